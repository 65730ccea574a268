"""Experiment trackers by their own libraries, each imported only where it is asked for.

===========  ======================================================================
tensorboard  event files in the run's folder (`tensorboard --logdir runs`)
wandb        Weights & Biases; without network by `WANDB_MODE=offline`, `wandb sync`
             later; the project is `$WANDB_PROJECT`, else `qerl-repro`
trackio      a local database (`trackio show`); the project is `qerl-repro`
===========  ======================================================================

Easy to get wrong: a resumed run does some steps again. They are not sent again
(`repro.runlog.run_logger`), since a tracker shows them twice or refuses them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from repro.spec.arm import require, unknown
from repro.spec.config import RunConfig

PROJECT = "qerl-repro"


class Tracker(Protocol):
    """Where a run's numbers go beside its files."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a step's finite numbers; steps come in order."""
        ...

    def close(self) -> None:
        """Hand over what is left."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """How a tracker is opened.

    Attributes
    ----------
    package
        What must be importable; its distribution has the same name.
    open
        From a run and its folder to a tracker.
    together
        Whether one process can follow several runs at once.
    """

    package: str
    open: Callable[[RunConfig, Path], Tracker]
    together: bool = True


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


class _OfRun:
    """A tracker whose module has one object per run."""

    _run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _WandB(_OfRun):
    def __init__(self, run: RunConfig, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = importlib.import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name_of(run),
            group=run.target,
            id=run.digest()[:16],
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            config=run.resolved(),
        )


class _Trackio(_OfRun):
    def __init__(self, run: RunConfig, folder: Path) -> None:
        del folder
        self._run = importlib.import_module("trackio").init(
            project=PROJECT,
            name=f"{name_of(run)}-{run.digest()[:8]}",
            group=run.target,
            resume="allow",
            embed=False,
            config=run.resolved(),
        )


ADAPTERS: dict[str, Adapter] = {
    "tensorboard": Adapter(package="tensorboard", open=_TensorBoard),
    "wandb": Adapter(package="wandb", open=_WandB),
    # Opening a second run ends the first.
    "trackio": Adapter(package="trackio", open=_Trackio, together=False),
}


def name_of(run: RunConfig) -> str:
    """Return a run's name for trackers: target, arm and seed."""
    return f"{run.target}/{run.arm.name}/seed-{run.seed}"


def parse_trackers(text: str | None) -> tuple[str, ...]:
    """Return the trackers that a flag names.

    Raises
    ------
    ValueError
        If a name is unknown (the message has the nearest), or a package is not installed (the
        message has the command that installs it).
    """
    names = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    require(text is None or bool(names), "--log names no tracker; leave it out for none")
    for name in names:
        if name not in ADAPTERS:
            raise ValueError(f"--log {name}: {unknown('tracker', name, list(ADAPTERS))}")
        package = ADAPTERS[name].package
        require(
            importlib.util.find_spec(package) is not None,
            f"--log {name}: the package {package} is not installed; pip install {package}",
        )
    return names


def require_side_by_side(names: Sequence[str]) -> None:
    """Raise `ValueError` where a tracker follows one run per process and several go together."""
    alone = [name for name in names if not ADAPTERS[name].together]
    require(
        not alone,
        f"--log {','.join(alone)}: it follows one run per process, and this tier carries out many "
        f"at once; use {' or '.join(name for name in ADAPTERS if ADAPTERS[name].together)}",
    )
