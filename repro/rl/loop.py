"""Steps from a checkpoint to the last one: when to stop, to evaluate and to save.

What a step is, its caller says: a rollout and its updates, or a batch of worked solutions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repro.rl.checkpoint import TrainState, load_checkpoint, save_checkpoint
from repro.rl.receipts import note_evaluation
from repro.spec.config import RunConfig, TrainScale


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a training run left behind.

    Attributes
    ----------
    finished
        False when `should_stop` ended it; the same call goes on from its checkpoint.
    step
        Optimiser steps done.
    series
        `{name: [one value a step]}`, None where a step has no value; `evaluation_step`,
        `evaluation_accuracy` and `evaluation_tokens` (sampled so far) have one an evaluation.
    effects
        What was really done: noise, mismatch by quarter of the completion, rows, seconds.
    """

    finished: bool
    step: int
    series: dict[str, list[float | int | None]]
    effects: dict[str, Any]


def load_or_begin(
    folder: Path,
    run: RunConfig,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> TrainState:
    """Restore the last checkpoint in `folder` and return its state, or that of a fresh run."""
    found = load_checkpoint(folder, run.digest(), parameters, optimizer)
    return found or TrainState(digest=run.digest(), step=0, draws=0, series={}, effects={})


def run_steps(
    run: RunConfig,
    state: TrainState,
    iterate: Callable[[], None],
    *,
    folder: Path,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    should_stop: Callable[[], bool] | None,
    evaluate: Callable[[int], float] | None,
) -> TrainResult:
    """Iterate until the scale's last step, or until asked to stop.

    Parameters
    ----------
    iterate
        Moves `state` on by one step or more, in place.
    folder
        Of the checkpoints.
    should_stop
        Asked before each iteration; True writes a checkpoint and ends.
    evaluate
        Called with the steps done every `scale.evaluation.every` steps, and before the first where
        the scale has a `token_budget`; its value goes into the series.
    """
    scale: TrainScale = run.scale
    every = scale.evaluation.every
    if evaluate is not None and scale.evaluation.token_budget and not state.series:
        note_evaluation(evaluate, state)  # the area under the curve starts where training starts
    saved = state.step
    while state.step < scale.steps:
        if should_stop is not None and should_stop():
            break
        began = state.step
        iterate()
        if evaluate is not None and every >= 1 and state.step // every != began // every:
            note_evaluation(evaluate, state)
        if state.step - saved >= scale.checkpoint_every:
            save_checkpoint(folder, state, parameters, optimizer)
            saved = state.step
    if state.step != saved or state.step == 0:
        save_checkpoint(folder, state, parameters, optimizer)
    return TrainResult(
        finished=state.step >= scale.steps,
        step=state.step,
        series=state.series,
        effects=state.effects,
    )
