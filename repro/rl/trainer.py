"""The training loop, top to bottom: rollout under noise, advantages, updates, logs, checkpoints.

Details that decide whether results are valid, with their sources:

1.  The run's seed fixes the order of problems; the seed of each completion comes from (seed, step,
    problem, k). So all arms of a seed are paired. (ours)
2.  Noise is added before sampling and removed after it; the trainer's log-probabilities are clean
    (Fig. 2, released code) unless `reach` is `shared`. Redrawn each rollout (Algorithm 1; section
    3.3 says "each forward pass").
3.  Tokens are drawn at T = 1 from the full distribution (Table 4). Top-p, top-k and min-p are not
    allowed in rollouts, because sampler and trainer would then have different distributions.
4.  Advantages are relative to the group, with ddof 1 (Eq. 3; released code), and zero where all
    rewards of a group are equal.
5.  The ratio divides by the trainer's own log-probabilities (released code) or the sampler's
    (Algorithm 1 as written). In the first update on a rollout the former makes the ratio exactly 1,
    so no second pass is needed and clipping has no effect.
6.  `updates_per_rollout` equal parts of a rollout, one optimiser step each (4 on GSM8K, Table 4);
    the released scripts use 1.
7.  Rows with zero advantage skip the backward pass but count in all normalisers. (exact)
    Micro-batches are sized by tokens; if memory runs out the step restarts with half as many.
8.  Every rollout compares the log-probabilities of sampler and trainer. Truncated importance
    sampling is an option of the loss (absent in paper and released code).
9.  Master weights, moments and noise are float32; the gradient norm is clipped before AdamW
    (released: 0.2).
10. No dropout: it would make the ratio differ from 1. A model with dropout is refused.
11. There is no random state to save in a checkpoint: all random numbers derive from seeds. On one
    thread a resumed run is bit-identical to an uninterrupted one.

Sources: arXiv 2510.11696 sections 3.2 to 4.1, Algorithm 1, Table 4, App. E.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from repro.distributed import BatchError
from repro.evidence.procedure import Stopped
from repro.rl.clock import Clock, WallClock
from repro.rl.collect import GrowingRollout, PromptSource, Rollout, Score, collect
from repro.rl.learner import Learner
from repro.rl.rollout_receipts import Tally, Values, note_accuracy, note_rollout, note_test
from repro.rl.rows import Rows
from repro.rl.step import StepInputs, step_metrics
from repro.rl.training_state import TrainState, fresh_state
from repro.spec.config import TrainScale

Answered = TypeVar("Answered")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hooks:
    """Callbacks of the training loop.

    Attributes
    ----------
    evaluate
        Takes the number of steps done; returns the held-out accuracy in percent. Called without
        added noise every `scale.evaluation.every` steps, and before the first step if the scale has
        a `token_budget`. None: no evaluation.
    test
        Takes the same; returns metrics on the test split, in percent. Called without added noise
        after the steps that `scale.evaluation.test_at` names.
    on_step
        Takes the number of steps done and the step's values: those of its series, and the wall
        seconds of its phases (`repro.rl.clock`).
    on_rollout
        Takes the number of steps done and the scored rollout, before the updates on it; may raise
        to end the run.
    on_fault
        Takes the number of steps done and the rollout, as far as it came, where no step can be made
        on it; returns what the error is to say of it.
    should_stop
        Called before each iteration; True writes a checkpoint and raises `Stopped`.
    tally
        Counts of the process besides the steps, saved in each checkpoint and continued from there.
    """

    evaluate: Callable[[int], float] | None = None
    test: Callable[[int], Mapping[str, float]] | None = None
    on_step: Callable[[int, Values], None] = lambda step, values: None
    on_rollout: Callable[[int, Rollout], None] = lambda step, rollout: None
    on_fault: Callable[[int, GrowingRollout], str] = lambda step, growing: ""
    should_stop: Callable[[], bool] = lambda: False
    tally: Tally = field(default_factory=Tally)


def everything(rows: Rows) -> Tensor:
    """Return the indices of all rows, (B,) int64."""
    return torch.arange(len(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    """The constant inputs of `iterate`.

    `taking_part` returns the indices of the rows of a rollout that are trained on; the clock is
    marked at the end of each phase. Of the hooks only `on_rollout` and `on_fault` are called.
    """

    learner: Learner
    source: PromptSource
    score: Score
    taking_part: Callable[[Rows], Tensor] = everything
    clock: Clock = field(default_factory=Clock)
    hooks: Hooks = field(default_factory=Hooks)


def train(
    learner: Learner, source: PromptSource, score: Score, hooks: Hooks, *, folder: Path
) -> TrainState:
    """Train a freshly loaded policy in place, or resume from the last checkpoint in `folder`.

    `source` yields prompts, and `score` rewards completions.

    Raises `ValueError` if the checkpoint belongs to another run; `Stopped` if it was asked to stop:
    the same call goes on from its checkpoint.
    """
    scale: TrainScale = learner.run.scale
    clock = WallClock(learner.ranks.spent)
    training = Training(learner=learner, source=source, score=score, hooks=hooks, clock=clock)
    state = learner.load(folder)
    if state is None:
        state = fresh_state(learner.run)
    else:
        hooks.tally.go_on_from(state.counts)
    learner.sampler.refresh()
    clock.leave_out()
    if scale.evaluation.token_budget and not state.series:
        # The area under the curve starts where training starts.
        _ask(learner, state, clock, hooks.evaluate, note_accuracy)
    saved = state.step
    clock.leave_out()
    while not _ended(state, scale):
        if hooks.should_stop():
            break
        began = state.step
        clock.mark("idle")
        steps = iterate(training, state)
        seconds = clock.take(len(steps))
        for number, values in enumerate(steps, start=began + 1):
            hooks.on_step(number, {**values, **seconds})
        every = scale.evaluation.every
        if every >= 1 and state.step // every != began // every:
            _ask(learner, state, clock, hooks.evaluate, note_accuracy)
        if any(began < step <= state.step for step in scale.evaluation.test_at):
            _ask(learner, state, clock, hooks.test, note_test)
        if state.step - saved >= scale.checkpoint_every:
            _save(learner, state, hooks, folder)
            saved = state.step
    if state.step != saved or state.step == 0:
        _save(learner, state, hooks, folder)
    if not _ended(state, scale):
        raise Stopped
    return state


def _ended(state: TrainState, scale: TrainScale) -> bool:
    """Return whether all steps are done, or the last test has the accuracy that ends training."""
    until = scale.evaluation.until
    last = state.series.get("test_accuracy_greedy", [])[-1:]
    reached = until > 0 and any((accuracy or 0.0) >= until for accuracy in last)
    return reached or state.step >= scale.steps


def _save(learner: Learner, state: TrainState, hooks: Hooks, folder: Path) -> None:
    """Write a checkpoint, with what was counted for the run."""
    state.counts = hooks.tally.counts()
    learner.save(folder, state)


def _ask(
    learner: Learner,
    state: TrainState,
    clock: WallClock,
    hook: Callable[[int], Answered] | None,
    note: Callable[[TrainState, int, Answered], None],
) -> None:
    """Evaluate without noise, outside of all phases, and note what it gave."""
    if hook is None:
        return
    clock.mark("idle")
    started = time.perf_counter()
    learner.sampler.refresh()
    note(state, state.step, hook(state.step))
    state.count_seconds("evaluation_seconds", started)
    clock.leave_out()


def iterate(t: Training, state: TrainState) -> list[Values]:
    """Make one rollout and the optimiser steps on it; advance `state` by these steps.

    All tiers train with this function; the systems tier times it. Returns the logged values of each
    step.

    Raises `BatchError` where a value that is not finite stops the steps before their optimiser.
    """
    growing = GrowingRollout(t.learner.run, t.source, step=state.step, draws=state.draws)
    try:
        return _iterate(t, state, growing)
    except (BatchError, FloatingPointError) as error:
        kept = t.hooks.on_fault(state.step, growing)
        raise BatchError(f"{error} (rollout of step {state.step + 1}{kept})") from error


def _iterate(t: Training, state: TrainState, growing: GrowingRollout) -> list[Values]:
    learner, step = t.learner, state.step
    scale: TrainScale = learner.run.scale
    started = time.perf_counter()
    with learner.perturbed(step, "rollout") as receipt:
        rollout = collect(growing, learner.sampler, t.score, t.clock)
    state.count_seconds("rollout_seconds", started)
    t.hooks.on_rollout(step, rollout)

    started = time.perf_counter()
    updates = min(scale.updates_per_rollout, scale.steps - step)
    parts = t.taking_part(rollout.rows).tensor_split(scale.updates_per_rollout)[:updates]
    t.clock.mark("idle")
    with learner.perturbed(step, "update"):
        steps, before = _update_all(t, rollout, parts, state)
    learner.sampler.refresh()
    t.clock.mark("optimizer")
    state.count_seconds("update_seconds", started)

    state.draws += rollout.batches
    once = note_rollout(learner.run, state, rollout, receipt, before, torch.cat(list(parts)))
    for values in steps:
        values |= once
        state.note(**values)
        state.step += 1
    t.clock.mark("idle")
    return steps


def _update_all(
    t: Training, rollout: Rollout, parts: Sequence[Tensor], state: TrainState
) -> tuple[list[Values], Tensor]:
    """Make all optimiser steps; return their values and the log-probabilities before the first.

    `parts` are the rows of each step.
    """
    learner = t.learner
    before = learner.old_logprobs(rollout, parts, state)
    reference = learner.reference_logprobs(rollout, state)
    t.clock.mark("logprobs")
    by_sampler = learner.run.arm.loss.old_policy == "sampler"
    steps: list[Values] = []
    for number, index in enumerate(parts):
        step = state.step + number
        # No step precedes the first: its own pass gives its old log-probabilities.
        old = None if number == 0 else before
        inputs = StepInputs(
            step=step,
            rollout=rollout,
            index=index,
            old=rollout.rows.sampled_logprobs if by_sampler else old,
            reference=reference,
        )
        output = learner.backward(inputs, state)
        t.clock.mark("update")
        moved = learner.step(step)
        t.clock.mark("optimizer")
        steps.append(step_metrics(rollout, index, output) | moved)
        if number == 0:
            before[index] = output.logprobs[index]
    return steps, before
