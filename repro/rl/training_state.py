"""The state of a run in training, and resumable checkpoints of it.

A checkpoint is a snapshot (`repro.rl.snapshots`: checksums, atomic, the last two kept) with
`parameters.safetensors` (what is trained, float32), `optimizer.safetensors` (the moments of each
parameter, by its name) and the `TrainState`. What ranks divide is whole here, so that any number of
them can go on. No random state is stored because none exists: every random stream is derived by
name from the run's seed and the step, so a resumed run draws what the uninterrupted one would have
drawn.

Easy mistakes: forgetting the optimiser's moments and step counter (training goes on, differently);
keeping the stage of the noise or of the learning rate as state rather than computing it from the
step; resuming a run whose configuration has changed.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repro.evidence.provenance import note_source
from repro.models.sharding import Shards
from repro.rl.optimizers import optimizer_tensors, restore_optimizer
from repro.rl.snapshots import Snapshot, SnapshotError, read_newest, write_snapshot
from repro.spec.config import RunConfig
from repro.spec.facts import Facts

PARAMETERS = "parameters.safetensors"
OPTIMIZER = "optimizer.safetensors"


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The state of a run besides tensors; grows with every step.

    Attributes
    ----------
    step
        Optimiser steps done.
    draws
        Batches of prompts drawn; more than rollouts where dynamic sampling refills.
    series
        `{name: [one value per step]}`, None where a step has no value; `evaluation_step`,
        `evaluation_accuracy` and `evaluation_tokens` (sampled so far) have one per evaluation.
    counts
        Counts of the process for the run when the checkpoint was written; see
        `repro.rl.rollout_receipts.Tally`.
    """

    digest: str
    step: int
    draws: int
    series: dict[str, list[float | int | None]]
    facts: Facts
    counts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = Facts(self.facts)  # a checkpoint's are plain JSON values

    def note(self, **values: float | int | None) -> None:
        """Append values to their series."""
        for name, value in values.items():
            self.series.setdefault(name, []).append(value)

    def count_seconds(self, name: str, started: float) -> None:
        """Add the seconds since `started` to a named total."""
        seconds = self.facts.setdefault("seconds", {})
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


def fresh_state(run: RunConfig) -> TrainState:
    """Return the state of a run that has made no step."""
    return TrainState(digest=run.digest(), step=0, draws=0, series={}, facts=Facts())


def save_checkpoint(
    folder: Path,
    state: TrainState,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    shards: Shards | None = None,
    writes: bool = True,
) -> Path | None:
    """Write the checkpoint of `state.step`, or help another rank to; return its folder."""
    note_source(state.facts)
    moments, numbers = optimizer_tensors(optimizer, parameters, shards)
    trained = {
        name: p.detach() if shards is None else shards.written(name, p.detach())
        for name, p in parameters.items()
    }
    if not writes:
        return None
    content = {"run": dataclasses.asdict(state), "optimizer_numbers": numbers, "ranks": _world()}
    return write_snapshot(folder, state.step, {PARAMETERS: trained, OPTIMIZER: moments}, content)


def load_checkpoint(
    folder: Path,
    digest: str,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    shards: Shards | None = None,
    sets_aside: bool = True,
) -> TrainState | None:
    """Restore the last good checkpoint in place and return its state, or None without any.

    Newer ones that were refused are named in `facts["checkpoints_refused"]`; other numbers of
    ranks, on which earlier steps were done, in `facts["ranks_before"]`. The digest is of the run's
    configuration. `shards` are this rank's, where ranks divide what is trained; `sets_aside` is as
    of `read_newest`, and of several ranks the first alone does it.

    Raises `ValueError` when every checkpoint is damaged, or of another configuration or other
    parameters; the message names each.
    """

    def restore(snapshot: Snapshot) -> tuple[TrainState, int]:
        state = TrainState(**snapshot.content["run"])
        if state.digest != digest:
            raise SnapshotError(
                f"it belongs to configuration {state.digest}; this training is of {digest}"
            )
        trained = snapshot.tensors[PARAMETERS]
        _require_alike(trained, parameters if shards is None else {**parameters, **shards.cut})
        with torch.no_grad():
            for name, parameter in parameters.items():
                whole = trained[name]
                parameter.copy_(whole if shards is None else shards.part(name, whole))
        numbers = snapshot.content["optimizer_numbers"]
        restore_optimizer(optimizer, parameters, snapshot.tensors[OPTIMIZER], numbers, shards)
        return state, snapshot.content.get("ranks", 1)

    newest = read_newest(folder, restore, sets_aside=sets_aside)
    if newest is None:
        return None
    (state, ranks), refused = newest
    if ranks != _world():
        state.facts["ranks_before"] = sorted({*state.facts.get("ranks_before", ()), ranks})
    if refused:
        state.facts.setdefault("checkpoints_refused", []).extend(refused)
    return state


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _require_alike(stored: dict[str, torch.Tensor], parameters: dict[str, nn.Parameter]) -> None:
    """Raise `SnapshotError` unless names and shapes of what was trained are those of these."""
    shapes, needed = (
        {name: tuple(tensor.shape) for name, tensor in of.items()} for of in (stored, parameters)
    )
    for name in sorted(shapes.keys() | needed.keys()):
        if shapes.get(name) != needed.get(name):
            raise SnapshotError(
                f"parameter {name} has shape {shapes.get(name)}; this run needs {needed.get(name)}"
            )
