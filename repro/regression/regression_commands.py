"""The commands `compare` and `regress`; exit status 0, 1 or 2.

0: nothing is shown to be worse. 1: something regressed. 2: could not judge: no GPU, nothing blessed
on this kind of device, no records, or records that are refused, failed or of another configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from repro.evidence.environment import capture_environment, device_of
from repro.evidence.provenance import source_commit
from repro.regression.judgement import (
    BLESSED,
    EXIT_STATUS,
    Judgement,
    blessed_side,
    judgement_of,
)
from repro.regression.render import markdown, print_judgement
from repro.run.execute import INTERRUPTED
from repro.run.places import expected_folder, runs_folder
from repro.run.select import select
from repro.spec.checks import require
from repro.spec.tier import Tier
from repro.spec.whole_files import replace_text
from repro.targets import find

COULD_NOT_JUDGE = EXIT_STATUS["could not judge"]
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# What `regress` measures when no target is named, and how many seeds of each (None: all).
TARGETS_BY_DEFAULT: dict[str, int | None] = {
    "table6": None,
    "table3": None,
    "step_lengths": None,
    "scaling": None,
    "memory_budgets": None,
    "kernels": 1,
}


def judged_or_not(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Return the exit status of a command, 2 if it breaks: Python's own 1 would say `regressed`."""
    try:
        return command(args)
    except (ValueError, OSError):
        raise
    except Exception:  # noqa: BLE001 - whatever went wrong, nothing was judged
        traceback.print_exc()
        return COULD_NOT_JUDGE


def main_compare(args: argparse.Namespace) -> int:
    """Carry out `repro compare A B`; return the exit status."""
    expected = expected_folder(args.expected)
    return _report(judgement_of(args.old, Path(args.new), args.targets, args.tier, expected))


def main_regress(args: argparse.Namespace, run: Callable[[Sequence[str]], int]) -> int:
    """Carry out `repro regress`: measure, compare with what is blessed, keep everything.

    `run` carries out a command line of `repro run` and returns its exit status.

    Where nothing is blessed all seeds are measured, as with `--baseline`: the records can then be
    blessed, which is what the verdict says.

    Raises `ValueError` without a GPU, or for a target that has no systems tier.
    """
    missing = Tier.SYSTEMS.missing()
    require(missing is None, f"regress measures on a GPU: {missing}")
    seeds: dict[str, int | None] = dict.fromkeys(args.targets) or _runnable_here()
    expected = expected_folder(args.expected)
    whole = set(seeds) if args.baseline else _without_baseline(list(seeds), expected)
    seeds = {name: None if name in whole else count for name, count in seeds.items()}
    folder = Path(args.runs) if args.runs else _new_folder()
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--baseline"] if args.baseline else []
    again = " ".join(["python -m repro regress", *args.targets, *flags, "--runs", str(folder)])
    due: Mapping[str, int | None] = seeds
    while True:
        if _measure(run, due, folder, expected) == INTERRUPTED:
            sys.stdout.write(f"interrupted; go on with: {again}\n")
            return COULD_NOT_JUDGE
        judgement = judgement_of(BLESSED, folder, list(seeds), Tier.SYSTEMS.value, expected)
        worse = {row.target for row in judgement.rows if row.verdict == "regressed"}
        # Unchanged kernels have been a sixth slower in one process than in five others.
        due = {name: None for name, count in due.items() if count is not None and name in worse}
        if not due:
            return _conclude(judgement, folder)
        sys.stdout.write(f"{', '.join(due)}: worse by the seeds measured; measuring the others\n")


def _runnable_here() -> dict[str, int | None]:
    """Return the targets measured by default that this machine has the devices for."""
    lacks = {name: find(name).not_runnable(Tier.SYSTEMS) for name in TARGETS_BY_DEFAULT}
    for name, sentence in lacks.items():
        if sentence:
            sys.stdout.write(f"{name}: not run: {sentence}\n")
    return {name: n for name, n in TARGETS_BY_DEFAULT.items() if lacks[name] is None}


def _new_folder() -> Path:
    """Return the folder of a new start: two on one day and commit must not share records."""
    commit, dirty = source_commit()
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    return runs_folder(None) / "regress" / f"{now}-{commit[:12]}{'-dirty' if dirty else ''}"


def _without_baseline(names: Sequence[str], expected: Path) -> set[str]:
    """Return the targets that have no usable blessed records on this machine's kind of device."""
    device = device_of(capture_environment())
    selections = select(list(names), tier=Tier.SYSTEMS.value)
    return {
        item.target.name
        for item in selections
        if blessed_side(expected, item, device, Path()).problems
    }


def _measure(
    run: Callable[[Sequence[str]], int],
    seeds: Mapping[str, int | None],
    folder: Path,
    expected: Path,
) -> int:
    """Run what has no record yet; without a terminal, its progress goes to a log."""
    worst = 0
    with contextlib.ExitStack() as stack:
        if not sys.stdout.isatty():
            log = stack.enter_context((folder / "run.log").open("a", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(log))
        for count in dict.fromkeys(seeds.values()):
            names = [name for name, own in seeds.items() if own == count]
            line = [*names, "--tier", Tier.SYSTEMS.value, "--runs", str(folder)]
            line += ["--expected", str(expected)]
            line += ["--seeds", str(count)] if count else []
            worst = max(worst, run(line))
            if worst == INTERRUPTED:
                break
    return worst


def _conclude(judgement: Judgement, folder: Path) -> int:
    """Write everything beside the records, print the judgement, return the exit status."""
    replace_text(folder / "regress.md", markdown(judgement))
    if os.environ.get(SUMMARY_VARIABLE):
        with Path(os.environ[SUMMARY_VARIABLE]).open("a", encoding="utf-8") as summary:
            summary.write(markdown(judgement))
    return _report(judgement, f"records, regress.md: {folder}")


def _report(judgement: Judgement, files: str = "") -> int:
    """Print a judgement and return its exit status, though the reader (head) may leave early."""
    try:
        print_judgement(judgement, files)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends
    return judgement.exit_status
