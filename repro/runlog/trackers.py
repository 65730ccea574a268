"""Experiment trackers by their own libraries, each imported only where it is asked for.

===========  ======================================================================
tensorboard  event files in the run's folder (`tensorboard --logdir runs`)
wandb        Weights & Biases; without network by `WANDB_MODE=offline`, `wandb sync`
             later; the project is `$WANDB_PROJECT`, else `qerl-repro`
===========  ======================================================================

Easy to get wrong: a resumed run does some steps again. They are not sent again
(`repro.runlog.run_logger`), since a tracker shows them twice or refuses them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from repro.evidence.record import Record
from repro.spec.checks import require, unknown
from repro.spec.config import RunConfig


class _TensorBoard:
    def __init__(self, name: str, digest: str, config: Mapping[str, Any], folder: Path) -> None:
        del name, digest, config
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, name: str, digest: str, config: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = importlib.import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "qerl-repro"),
            name=name,
            group=config["target"],
            id=digest[:16],
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            config=dict(config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


# `log` takes a step's finite numbers, steps in order; `close` hands over what is left.
Tracker = _TensorBoard | _WandB
# By their packages' names; each is opened with a run's name, digest and settings, and its folder.
TRACKERS: dict[str, Callable[[str, str, Mapping[str, Any], Path], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
}


def name_of(run: RunConfig) -> str:
    """Return a run's name for trackers: target, arm and seed."""
    return f"{run.target}/{run.arm.name}/seed-{run.seed}"


def parse_trackers(text: str | None) -> tuple[str, ...]:
    """Return the trackers that a flag names; unknown and not installed ones raise."""
    names = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    require(text is None or bool(names), "--log names no tracker; leave it out for none")
    for name in names:
        require(name in TRACKERS, f"--log {name}: {unknown('tracker', list(TRACKERS), name)}")
        require(
            importlib.util.find_spec(name) is not None,
            f"--log {name}: the package {name} is not installed; pip install {name}",
        )
    return names


def send(records: Iterable[Record], trackers: Sequence[str], folder: Path) -> int:
    """Hand the series of trained runs to trackers, as `--log` does while one trains.

    Each run has a folder of its own below `folder`. Returns how many runs were sent.
    """
    trained = {record.digest: record for record in records if record.procedure == "train"}
    for record in trained.values():
        name = f"{record.target}/{record.arm}/seed-{record.seed}"
        for opened in (TRACKERS[kind] for kind in trackers):
            tracker = opened(name, record.digest, record.config, folder / name)
            for step in range(max(map(len, record.series.values()), default=0)):
                reached = {key: of for key, of in record.series.items() if step < len(of)}
                values = {key: v for key, of in reached.items() if (v := of[step]) is not None}
                tracker.log(step + 1, values)
            tracker.close()
    return len(trained)
