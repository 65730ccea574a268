"""The training loop, top to bottom: rollout under noise, advantages, updates, logs, checkpoints.

There is no other: it is written over a list of runs, of which a run by itself is a list of one and
an ensemble one of many (`repro.rl.policies`). Every step: noise of each run, one sampling of all
runs' prompts, rewards, advantages run by run, the updates, receipts run by run. Runs side by side
are the runs that they would have been alone, up to the order of floating-point sums.

The details that decide whether a run means what it says, with where they come from:

1.  Problems in an order fixed by the run's seed; completions' seeds from (seed, step, problem, k):
    all arms of a seed are paired. (ours)
2.  Noise is added before sampling and removed after it; the trainer's log-probabilities are clean
    (Fig. 2, released code) unless `reach` is `shared`. Redrawn each rollout (Algorithm 1; section
    3.3 says "each forward pass").
3.  The sampler's tokens are drawn at T = 1 from the full distribution (Table 4); top-p, top-k and
    min-p are refused in rollouts, because the trainer's softmax would not be the sampler's.
4.  Advantages by group, ddof 1 (Eq. 3; released code), zero for groups of equal rewards.
5.  The ratio divides by the trainer's own log-probabilities (released code) or the sampler's
    (Algorithm 1 as written). With one update per rollout the former is exactly 1: no second pass is
    made and clipping cannot act. The first update of every rollout always takes this path.
6.  `updates_per_rollout` equal parts of a rollout, one optimiser step each (4 on GSM8K, Table 4);
    the released scripts use 1.
7.  Rows with zero advantage skip the backward pass and stay in all normalisers. (exact)
    Micro-batches are cut by tokens; where memory runs out the step starts over with half as many.
8.  Sampler and trainer are compared on every rollout; correction by truncated importance sampling
    is the loss's choice (absent in paper and released code).
9.  Masters, moments and noise are float32; gradient norm clipped before AdamW (released: 0.2).
10. No dropout anywhere: it would move the ratio off 1. Refused when a model has any.
11. A checkpoint holds no random state, since none exists; a resumed run continues to the bit on one
    thread.

Sources: arXiv 2510.11696 sections 3.2 to 4.1, Algorithm 1, Table 4, App. E.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from repro.rl.clock import Clock, NoClock, WallClock
from repro.rl.collect import GrowingRollout, Prompts, Rollout, Score, collect
from repro.rl.loop import Hooks, OnRollout, StepValues, run_steps
from repro.rl.loss import check_loss
from repro.rl.noise import NoiseReceipt
from repro.rl.policies import Policies, StepInputs
from repro.rl.receipts import Values, note_rollout, note_step
from repro.rl.rows import Rows
from repro.rl.runs import FailedRun, RunStates, TrainResult
from repro.rl.step import StepOutput, step_metrics
from repro.spec.config import RunConfig, TrainScale

# Single or stacked; what measures a single policy reads its parts.
Trained = TypeVar("Trained", bound=Policies)
# Per run: the rows of each of its rollout's optimiser steps; none where it has no rollout.
Parts = Sequence[Sequence[Tensor]]
# Per run: (B, T) log-probabilities, or None.
Logprobs = Sequence[Tensor | None]


def train(
    policies: Policies, sources: Sequence[Prompts], score: Score, hooks: Hooks, *, folder: Path
) -> list[TrainResult | FailedRun]:
    """Train freshly loaded policies in place, or go on from `folder`'s last checkpoint.

    `sources` give each run's prompts, and `score` what completions of all runs are worth. Returns
    the result of each run; of policies that do not freeze runs, never a `FailedRun`.

    Raises `ValueError` when a configuration asks for something that cannot be trained as it says,
    or a checkpoint belongs to other runs.
    """
    clock = WallClock()
    training = replace(prepare(policies, sources, score), on_rollout=hooks.on_rollout, clock=clock)
    return run_steps(policies, partial(iterate, training), hooks, folder=folder, clock=clock)


def everything(rows: Rows) -> Tensor:
    """Return the indices of all rows, (B,) int64."""
    return torch.arange(len(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training(Generic[Trained]):
    """What steps work on; everything that changes is inside its parts or in the states.

    Attributes
    ----------
    sources
        One per run: where its prompts come from.
    taking_part
        Which rows of a rollout the updates are on, by index.
    clock
        Marked at the end of each phase.
    on_rollout
        As of `Hooks`.
    """

    policies: Trained
    sources: Sequence[Prompts]
    score: Score
    taking_part: Callable[[Rows], Tensor] = everything
    clock: Clock = field(default_factory=NoClock)
    on_rollout: OnRollout | None = None

    @property
    def scale(self) -> TrainScale:
        """That of all runs."""
        scale: TrainScale = self.policies.runs[0].scale
        return scale


def prepare(policies: Trained, sources: Sequence[Prompts], score: Score) -> Training[Trained]:
    """Return the training of runs that can be trained.

    Raises `ValueError` when a configuration asks for something that cannot be trained as it says.
    """
    for run in policies.runs:
        require_trainable(run)
    return Training(policies=policies, sources=sources, score=score)


def iterate(t: Training[Trained], state: RunStates) -> list[StepValues]:
    """One rollout of every run and its updates; `state` moves on by as many steps.

    This is the step of every tier: the systems tier calls it under a clock of its own. Returns the
    values of each step.
    """
    step, scale = state.step, t.scale
    started = time.perf_counter()
    with t.policies.perturbed(step, "rollout") as receipts:
        rollouts = _collect(t, state)
    state.count_seconds("rollout_seconds", started)
    if t.on_rollout is not None:
        for run, error in (t.on_rollout(step, rollouts) or {}).items():
            state.fail(run, error)
            rollouts[run] = None

    started = time.perf_counter()
    updates = min(scale.updates_per_rollout, scale.steps - step)
    parts = [_parts(t, rollout)[:updates] for rollout in rollouts]
    t.clock.mark("idle")
    with t.policies.perturbed(step, "update"):
        steps, before = _update_all(t, rollouts, parts, state, updates)
    t.policies.refresh()
    t.clock.mark("optimizer")
    state.count_seconds("update_seconds", started)

    _note(t, state, rollouts, receipts, parts, steps, before)
    state.step += updates
    t.clock.mark("idle")
    return steps


def _collect(t: Training[Trained], state: RunStates) -> list[Rollout | None]:
    """Sample and score every live run's rollout; a run that cannot have one has failed."""
    growing = [
        GrowingRollout(run, source, step=state.step, draws=own.draws)
        for run, source, own in zip(t.policies.runs, t.sources, state.runs, strict=True)
    ]
    return collect(growing, state, t.policies.sample, t.score, t.clock)


def _parts(t: Training[Trained], rollout: Rollout | None) -> Sequence[Tensor]:
    """Return the rows of each optimiser step that a whole rollout would have."""
    if rollout is None:
        return ()
    return t.taking_part(rollout.rows).tensor_split(t.scale.updates_per_rollout)


def _update_all(
    t: Training[Trained],
    rollouts: Sequence[Rollout | None],
    parts: Parts,
    state: RunStates,
    updates: int,
) -> tuple[list[StepValues], Logprobs]:
    """Make rollouts' optimiser steps; return their values and the log-probabilities before them."""
    before = t.policies.old_logprobs(rollouts, parts, state)
    reference = t.policies.reference_logprobs(rollouts, state)
    t.clock.mark("logprobs")
    steps: list[StepValues] = []
    for number in range(updates):
        step = state.step + number
        old = [None] * len(rollouts) if number == 0 else before
        run_parts = state.each(partial(_part, t, rollouts, parts, number, step, old, reference))
        outputs = t.policies.backward(run_parts, state)
        t.clock.mark("update")
        moved = t.policies.step(state, step)
        t.clock.mark("optimizer")
        steps.append([_values(*one) for one in zip(rollouts, outputs, moved, strict=True)])
        if number == 0:
            # The first part's own pass serves as its old log-probabilities.
            for values, output in zip(before, outputs, strict=True):
                if values is not None and output is not None:
                    values[output.plan.index] = output.logprobs[output.plan.index]
    return steps, before


def _part(
    t: Training[Trained],
    rollouts: Sequence[Rollout | None],
    parts: Parts,
    number: int,
    step: int,
    old: Logprobs,
    reference: Logprobs,
    s: int,
) -> StepInputs | None:
    """Return run `s`'s part in the rollout's optimiser step of that number."""
    run, rollout = t.policies.runs[s], rollouts[s]
    if rollout is None:
        return None
    by_sampler = run.arm.loss.old_policy == "sampler"
    return StepInputs(
        run=run,
        step=step,
        rollout=rollout,
        index=parts[s][number],
        old=rollout.rows.sampled_logprobs if by_sampler else old[s],
        reference=reference[s],
    )


def _values(
    rollout: Rollout | None, output: StepOutput | None, moved: Values | None
) -> Values | None:
    """Return a run's values of one step; None where it made none."""
    if rollout is None or output is None or moved is None:
        return None
    return step_metrics(rollout, output) | moved


def _note(
    t: Training[Trained],
    state: RunStates,
    rollouts: Sequence[Rollout | None],
    receipts: Sequence[NoiseReceipt],
    parts: Parts,
    steps: Sequence[StepValues],
    before: Logprobs,
) -> None:
    """Write receipts and series of every run that has a rollout, up to where it failed."""
    for s, (rollout, logprobs) in enumerate(zip(rollouts, before, strict=True)):
        if rollout is None or logprobs is None:
            continue
        own = state.runs[s]
        own.draws += rollout.batches
        done = torch.cat(list(parts[s]))
        once = note_rollout(t.policies.runs[s], own, rollout, receipts[s], logprobs, done)
        for step in steps:
            values = step[s]
            if values is None:
                break
            values |= once
            note_step(own, values)


def require_trainable(run: RunConfig) -> None:
    """Raise `ValueError` for what would train something else than configured."""
    scale = run.scale
    if not isinstance(scale, TrainScale):
        raise TypeError(f"run.scale is a {type(scale).__name__}; training needs a TrainScale")
    check_loss(run.arm.loss)
    sampling = scale.rollout
    if sampling.temperature <= 0:
        raise ValueError(
            f"rollout temperature is {sampling.temperature}; training samples, so it must be > 0"
        )
    if sampling.filtered:
        raise ValueError(
            f"rollouts use top_p {sampling.top_p}, top_k {sampling.top_k}, min_p {sampling.min_p}; "
            "the trainer's log-probabilities are of the full softmax, so they must be 1, 0 and 0"
        )
