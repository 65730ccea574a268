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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from repro.spec.arm import require, unknown
from repro.spec.config import RunConfig


class Tracker(Protocol):
    """Destinations of a run's numbers besides its files."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a step's finite numbers; steps come in order."""
        ...

    def close(self) -> None:
        """Hand over what is left."""
        ...


class _TensorBoard:
    def __init__(self, run: RunConfig, folder: Path) -> None:
        del run
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, run: RunConfig, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = importlib.import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "qerl-repro"),
            name=name_of(run),
            group=run.target,
            id=run.digest()[:16],
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            config=run.resolved(),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


# By their packages' names; each is opened from a run and its folder.
TRACKERS: dict[str, Callable[[RunConfig, Path], Tracker]] = {
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
        if name not in TRACKERS:
            raise ValueError(f"--log {name}: {unknown('tracker', name, list(TRACKERS))}")
        require(
            importlib.util.find_spec(name) is not None,
            f"--log {name}: the package {name} is not installed; pip install {name}",
        )
    return names
