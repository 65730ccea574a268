"""Resumable checkpoints of a training run: what is trained, the optimiser, and what it wrote down.

A checkpoint is a snapshot (`repro.rl.snapshots`: checksums, atomic, the last two kept) with
`parameters.safetensors` (what is trained, float32), `optimizer.safetensors` (the moments of each
parameter, by its name) and the run's `TrainState`. No random state is stored because none exists:
every random stream is derived by name from the run's seed and the step, so a resumed run draws what
the uninterrupted one would have drawn.

Easy mistakes: forgetting the optimiser's moments and step counter (training goes on, differently);
keeping the stage of the noise or of the learning rate as state rather than computing it from the
step; resuming a run whose configuration has changed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repro.evidence.provenance import note_source
from repro.rl.single_run.optimizers import optimizer_tensors, require_moments, restore_optimizer
from repro.rl.snapshots import (
    Snapshot,
    SnapshotError,
    require_same_tensors,
    restore_newest,
    write_snapshot,
)

PARAMETERS = "parameters.safetensors"
OPTIMIZER = "optimizer.safetensors"
# Of a state's fields, by the first word of their type.
_KINDS: dict[str, type] = {"str": str, "int": int, "list": list, "dict": dict}


@dataclass(slots=True, kw_only=True)
class TrainState:
    """What a run knows beside tensors; grows with every step.

    Attributes
    ----------
    digest
        Of the run's configuration.
    draws
        Batches of prompts drawn; more than rollouts where dynamic sampling refills.
    series
        `{name: [one value per step]}`.
    effects
        What was really done, JSON values.
    counts
        What the process had counted for the run beside its steps, when the checkpoint was written;
        see `repro.rl.receipts.Tally`.
    """

    digest: str
    step: int
    draws: int
    series: dict[str, list[float | int | None]]
    effects: dict[str, Any]
    counts: dict[str, Any] = field(default_factory=dict)

    def note_refused(self, sentences: list[str]) -> None:
        """Write into the record which checkpoints could not be gone on from, and why."""
        if sentences:
            self.effects.setdefault("checkpoints_refused", []).extend(sentences)


def save_checkpoint(
    folder: Path,
    state: TrainState,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> Path:
    """Write the checkpoint of `state.step`; return its folder."""
    note_source(state.effects)
    content = {"state": dataclasses.asdict(state)}
    return write_trained(folder, state.step, parameters, optimizer, content)


def load_checkpoint(
    folder: Path,
    digest: str,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> TrainState | None:
    """Restore the last good checkpoint in place and return its state, or None without any.

    Newer ones that were refused are named in `effects["checkpoints_refused"]`.

    Raises
    ------
    ValueError
        When every checkpoint is damaged, or of another configuration or other parameters; the
        message names each.
    """

    def restore(snapshot: Snapshot) -> TrainState:
        state = parse_state(snapshot.value("state", dict), snapshot.step)
        if state.step != snapshot.step:
            raise SnapshotError(f"the run's state is of step {state.step}")
        if state.digest != digest:
            raise SnapshotError(f"it belongs to configuration {state.digest}; this run is {digest}")
        restore_trained(snapshot, parameters, optimizer)
        return state

    return restore_newest(folder, restore)


def write_trained(
    folder: Path,
    step: int,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    content: dict[str, Any],
) -> Path:
    """Write a snapshot of parameters, their optimiser and further JSON values."""
    moments, numbers = optimizer_tensors(optimizer, parameters)
    trained = {name: parameter.detach() for name, parameter in parameters.items()}
    files = {PARAMETERS: trained, OPTIMIZER: moments}
    return write_snapshot(folder, step, files, {**content, "optimizer_numbers": numbers})


def restore_trained(
    snapshot: Snapshot, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Put back what `write_trained` wrote.

    Raises
    ------
    ValueError
        When parameters or moments are missing, foreign, of other shapes or of another step; nothing
        is changed then.
    """
    trained, moments = snapshot.file(PARAMETERS), snapshot.file(OPTIMIZER)
    numbers = snapshot.value("optimizer_numbers", dict)
    if not all(isinstance(own, dict) for own in numbers.values()):
        raise SnapshotError(f"optimizer_numbers are {numbers}; each parameter has a dictionary")
    require_same_tensors(trained, parameters, "parameter")
    require_moments(optimizer, parameters, moments, numbers, snapshot.step)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(trained[name])
    restore_optimizer(optimizer, parameters, moments, numbers)


def parse_state(values: Any, most_steps: int) -> TrainState:
    """Return the state that JSON values stand for.

    Parameters
    ----------
    most_steps
        Of the checkpoint; a run of an ensemble that failed may have done fewer.

    Raises
    ------
    SnapshotError
        When a field is missing, foreign or of the wrong kind, or the step cannot be.
    """
    fields = {item.name: str(item.type) for item in dataclasses.fields(TrainState)}
    if not isinstance(values, dict) or values.keys() != fields.keys():
        keys = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise SnapshotError(f"a run's state has {keys}; it must have {sorted(fields)}")
    for name, kind in fields.items():
        if not isinstance(values[name], _KINDS[kind.partition("[")[0]]):
            raise SnapshotError(f"{name} of a run's state is {values[name]!r}; it must be a {kind}")
    state = TrainState(**values)
    if not all(isinstance(series, list) for series in state.series.values()):
        raise SnapshotError("a series of a run's state is not a list")
    if not 0 <= state.step <= most_steps:
        raise SnapshotError(
            f"a run's state is of step {state.step}; the checkpoint of {most_steps}"
        )
    return state
