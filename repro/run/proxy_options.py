"""The command line's options for `run pretrain-proxy`: which size, which data, where to."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from repro.data.load import DATA_VARIABLE
from repro.evidence.record import find_record
from repro.models.proxy_names import proxy_folder, seeded, size_and_seed, size_of
from repro.run.select import Selection
from repro.spec.arm import require
from repro.spec.config import RunConfig
from repro.spec.variants import with_human_problems

TARGET = "pretrain_proxy"


def with_proxy_options(selection: Selection, args: argparse.Namespace) -> Selection:
    """Return the selection with the options applied, or as it is where none was given.

    Folders are passed on to the worker processes as environment variables, `--out` as
    `$REPRO_POLICIES` and `--human-data` as `$REPRO_DATA`, so that what a run is does not depend on
    where its files lie.

    Raises
    ------
    ValueError
        When an option stands beside another target, or the folder of data does not exist.
    """
    human, out = getattr(args, "human_data", None), getattr(args, "policies", None)
    size = getattr(args, "size", None)
    given = (human, out, size) != (None, None, None)
    if selection.source.name != TARGET and not given:
        return selection
    require(
        selection.source.name == TARGET,
        f"--size, --human-data and --out are for pretrain-proxy; {selection.target.name} takes "
        "none of them",
    )
    source = selection.source
    if size is not None:
        require(args.arms is None, f"--size {size} and --arms {args.arms} say the same; give one")
        name, seed = size_and_seed(size)
        args.arms = f"proxy_{name}".replace("-", "_")
        if seed:
            require(
                getattr(args, "seeds", None) is None,
                f"--size {size} and --seeds {args.seeds} both name seeds; give one",
            )
            args.seeds = f"{seed},"  # with the comma a list of one, not a count
    if out is not None:
        from repro.spec.tier import POLICIES_VARIABLE

        os.environ[POLICIES_VARIABLE] = str(Path(out).resolve())
    if human is not None:
        folder = Path(human).expanduser()
        require(folder.is_dir(), f"--human-data {human}: there is no such folder")
        os.environ[DATA_VARIABLE] = str(folder.resolve())
        source = with_human_problems(source)
    return dataclasses.replace(selection, target=source, source=source)


def making(name: str) -> str:
    """Return the command that makes the proxy policy of a name."""
    return f"python -m repro run pretrain-proxy --size {size_of(name)}"


def sentence_on_lost_policies(plan: list[RunConfig], runs: Path) -> str | None:
    """Return a sentence where a run is recorded and its policy is not where it is looked for."""
    for run in plan:
        if run.target != TARGET or find_record(run, runs) is None:
            continue
        folder = proxy_folder(seeded(run.arm.name.replace("_", "-"), run.seed))
        if not (folder / "config.json").is_file():
            return (
                f"{run.arm.name} is recorded in {runs}, but {folder} holds no policy: name another "
                "folder of records (--runs) to make it again"
            )
    return None
