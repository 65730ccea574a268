"""Checkpoints of a whole ensemble: masters and moments of all runs, and what each run knows.

As `repro.rl.training_checkpoint`, with a row per run: a snapshot (`repro.rl.snapshots`) whose
tensors are in `ensemble.safetensors`. No random state exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.evidence.provenance import note_source
from repro.rl.runs import RunStates
from repro.rl.snapshots import (
    Snapshot,
    SnapshotError,
    require_same_tensors,
    restore_newest,
    write_snapshot,
)
from repro.rl.stacked.masters import Masters
from repro.rl.stacked.optimizer import StackedAdamW
from repro.rl.stacked.stack import Stack
from repro.rl.training_checkpoint import parse_state

TENSORS = "ensemble.safetensors"


def save_ensemble(folder: Path, state: RunStates, stack: Stack, optimizer: StackedAdamW) -> Path:
    """Write the checkpoint of `state.step`; return its folder."""
    for run in state.runs:
        note_source(run.effects)
    content = {
        "updates": optimizer.steps,
        "layout": _layout(stack),
        "runs": [dataclasses.asdict(run) for run in state.runs],
        "failures": state.failures,
    }
    return write_snapshot(folder, state.step, {TENSORS: _tensors(stack, optimizer)}, content)


@torch.no_grad()
def load_ensemble(
    folder: Path, digests: Sequence[str], stack: Stack, optimizer: StackedAdamW
) -> RunStates | None:
    """Restore the last good checkpoint in place and return its state, or None without any.

    Newer ones that were refused are named in the effects of every run.

    Raises
    ------
    ValueError
        When every checkpoint is of other runs or damaged; the message names each.
    """

    def restore(snapshot: Snapshot) -> RunStates:
        state = _parse(snapshot, digests)
        if snapshot.value("layout", dict) != _layout(stack):
            raise SnapshotError("its runs train other tensors than these, or of other shapes")
        if snapshot.value("updates", int) != state.step:
            raise SnapshotError(f"its optimiser made {snapshot.content['updates']} updates")
        stored, needed = snapshot.file(TENSORS), _tensors(stack, optimizer)
        require_same_tensors(stored, needed, "tensor")
        for name, target in needed.items():
            target.copy_(stored[name])
        optimizer.steps = state.step
        return state

    return restore_newest(folder, restore)


def _parse(snapshot: Snapshot, digests: Sequence[str]) -> RunStates:
    """Return the state that a snapshot holds, of runs with these digests."""
    runs = [parse_state(values, snapshot.step) for values in snapshot.value("runs", list)]
    failures = snapshot.value("failures", list)
    if [run.digest for run in runs] != list(digests):
        raise SnapshotError("it belongs to other runs, or to others in another order")
    if len(failures) != len(runs) or not all(isinstance(f, str | None) for f in failures):
        raise SnapshotError(f"failures are {failures}; each of {len(runs)} runs has one, or null")
    for run, failure in zip(runs, failures, strict=True):
        if failure is None and run.step != snapshot.step:
            raise SnapshotError(f"a run is at step {run.step} of {snapshot.step}, and not failed")
    return RunStates(step=snapshot.step, runs=runs, failures=failures)


def _tensors(stack: Stack, optimizer: StackedAdamW) -> dict[str, Tensor]:
    """Return masters and moments, (S, n) each."""
    return {
        "values": _masters(stack).values,
        "first": optimizer.first,
        "second": optimizer.second,
    }


def _layout(stack: Stack) -> dict[str, Any]:
    """Return the shapes of what is trained, by name in the order of the columns of (S, n)."""
    leaves = _masters(stack).leaves
    return {"names": list(leaves), "shapes": [list(leaf.shape) for leaf in leaves.values()]}


def _masters(stack: Stack) -> Masters:
    if stack.masters is None:
        raise ValueError("the stack's runs train nothing; there is nothing to keep")
    return stack.masters
