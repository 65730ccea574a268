"""Resumable checkpoints of training: what is trained, the optimiser, and what runs wrote down.

A checkpoint is a snapshot (`repro.rl.snapshots`: checksums, atomic, the last two kept) with
`parameters.safetensors` (what is trained, float32), `optimizer.safetensors` (the moments of each
parameter, by its name) and the `RunStates`; of an ensemble the parameters are a row per run. What
ranks divide is whole here, so that any number of them can go on. No
random state is stored because none exists: every random stream is derived by name from the run's
seed and the step, so a resumed run draws what the uninterrupted one would have drawn.

Easy mistakes: forgetting the optimiser's moments and step counter (training goes on, differently);
keeping the stage of the noise or of the learning rate as state rather than computing it from the
step; resuming a run whose configuration has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from repro.evidence.provenance import note_source
from repro.models.sharding import Shards
from repro.rl.runs import RunStates, TrainState
from repro.rl.single_run.optimizers import optimizer_tensors, restore_optimizer
from repro.rl.snapshots import Snapshot, SnapshotError, read_newest, write_snapshot

PARAMETERS = "parameters.safetensors"
OPTIMIZER = "optimizer.safetensors"


def save_checkpoint(
    folder: Path,
    state: RunStates,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    shards: Shards | None = None,
    writes: bool = True,
) -> Path | None:
    """Write the checkpoint of `state.step`, or help another rank to; return its folder."""
    for run in state.runs:
        note_source(run.facts)
    moments, numbers = optimizer_tensors(optimizer, parameters, shards)
    trained = {
        name: p.detach() if shards is None else shards.written(name, p.detach())
        for name, p in parameters.items()
    }
    if not writes:
        return None
    content = {
        "runs": [dataclasses.asdict(run) for run in state.runs],
        "failures": state.failures,
        "optimizer_numbers": numbers,
        "ranks": _world(),
    }
    return write_snapshot(folder, state.step, {PARAMETERS: trained, OPTIMIZER: moments}, content)


def load_checkpoint(
    folder: Path,
    digests: Sequence[str],
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    freeze: bool = False,
    shards: Shards | None = None,
    sets_aside: bool = True,
) -> RunStates | None:
    """Restore the last good checkpoint in place and return its state, or None without any.

    Newer ones that were refused are named in `facts["checkpoints_refused"]` of every run; other
    numbers of ranks, on which earlier steps were done, in `facts["ranks_before"]`.

    Raises `ValueError` when every checkpoint is damaged, or of other configurations or parameters;
    the message names each.

    Parameters
    ----------
    digests
        Of the runs' configurations.
    freeze
        As of `RunStates`.
    shards
        This rank's, where ranks divide what is trained.
    sets_aside
        As of `read_newest`; of several ranks the first alone does it.
    """
    written_on: list[int] = []

    def restore(snapshot: Snapshot) -> RunStates:
        runs = [TrainState(**values) for values in snapshot.content["runs"]]
        stored = [run.digest for run in runs]
        if stored != list(digests):
            raise SnapshotError(
                f"it belongs to configurations {', '.join(stored)}; this training is of "
                f"{', '.join(digests)}"
            )
        trained = snapshot.tensors[PARAMETERS]
        _require_alike(trained, parameters if shards is None else {**parameters, **shards.cut})
        with torch.no_grad():
            for name, parameter in parameters.items():
                whole = trained[name]
                parameter.copy_(whole if shards is None else shards.part(name, whole))
        numbers = snapshot.content["optimizer_numbers"]
        restore_optimizer(optimizer, parameters, snapshot.tensors[OPTIMIZER], numbers, shards)
        failures = snapshot.content["failures"]
        written_on.append(snapshot.content.get("ranks", 1))
        return RunStates(step=snapshot.step, runs=runs, failures=failures, freeze=freeze)

    newest = read_newest(folder, restore, sets_aside=sets_aside)
    if newest is None:
        return None
    state, refused = newest
    for run in state.runs:
        if written_on[-1] != _world():
            run.facts["ranks_before"] = sorted({*run.facts.get("ranks_before", ()), written_on[-1]})
        if refused:
            run.facts.setdefault("checkpoints_refused", []).extend(refused)
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
