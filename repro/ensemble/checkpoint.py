"""Checkpoints of a whole ensemble: masters and moments of all runs, and what each run knows.

As `repro.rl.checkpoint`, with a row a run: `ensemble.safetensors` and `state.json` in a folder
`step-00000010/`, written under another name, flushed and renamed. No random state exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from repro.ensemble.masters import Masters
from repro.ensemble.optimizer import StackedAdamW
from repro.ensemble.stack import Stack
from repro.rl.checkpoint import TrainState, publish, read_newest

TENSORS = "ensemble.safetensors"
SCHEMA = 1


@dataclass(slots=True, kw_only=True)
class EnsembleState:
    """What an ensemble knows beside tensors.

    Attributes
    ----------
    step
        Optimiser steps done.
    runs
        One state a run; a frozen run's stays behind.
    failures
        One a run: why it was frozen, or None.
    """

    step: int
    runs: list[TrainState]
    failures: list[str | None]


def save_ensemble(
    folder: Path, state: EnsembleState, stack: Stack, optimizer: StackedAdamW
) -> Path:
    """Write the checkpoint of `state.step`, then remove older ones; return its folder."""
    tensors = {
        "values": _masters(stack).values.cpu(),
        "first": optimizer.first.cpu(),
        "second": optimizer.second.cpu(),
    }
    content = {
        "schema": SCHEMA,
        "step": state.step,
        "updates": optimizer.steps,
        "runs": [dataclasses.asdict(run) for run in state.runs],
        "failures": state.failures,
    }
    return publish(folder, state.step, {TENSORS: tensors}, content)


@torch.no_grad()
def load_ensemble(
    folder: Path, digests: Sequence[str], stack: Stack, optimizer: StackedAdamW
) -> EnsembleState | None:
    """Restore the last checkpoint in place and return its state, or None when there is none.

    Raises
    ------
    ValueError
        When the checkpoint is of other runs or damaged; the message names the folder.
    """
    found = read_newest(folder, (TENSORS,))
    if found is None:
        return None
    newest, content, (tensors,) = found
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"checkpoint {newest} has schema {content.get('schema')}; this is {SCHEMA}"
        )
    runs = [TrainState(**fields) for fields in content["runs"]]
    if [run.digest for run in runs] != list(digests):
        raise ValueError(
            f"checkpoint {newest} belongs to other runs, or to others in another order"
        )
    masters = _masters(stack)
    for name, target in (
        ("values", masters.values), ("first", optimizer.first), ("second", optimizer.second)
    ):  # fmt: skip
        if tensors[name].shape != target.shape:
            raise ValueError(
                f"checkpoint {newest}: {name} has shape {tuple(tensors[name].shape)}; the runs "
                f"need {tuple(target.shape)}"
            )
        target.copy_(tensors[name])
    optimizer.steps = content["updates"]
    return EnsembleState(step=content["step"], runs=runs, failures=content["failures"])


def _masters(stack: Stack) -> Masters:
    if stack.masters is None:
        raise ValueError("the stack's runs train nothing; there is nothing to keep")
    return stack.masters
