"""The training loop, top to bottom: rollout under noise, advantages, updates, logs, checkpoints.

This is the only training loop. It works on a list of runs: a single run is a list of one, an
ensemble a list of many (`repro.rl.policies`). Each iteration adds every run's noise, samples the
completions of all runs together, computes rewards and advantages per run, updates the policies and
notes receipts per run. Stacking does not change a run, up to the order of floating-point sums.

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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from repro.rl.clock import Clock, NoClock, WallClock
from repro.rl.collect import GrowingRollout, Prompts, Rollout, Score, collect
from repro.rl.loop import Hooks, StepValues, run_steps
from repro.rl.noise import NoiseReceipt
from repro.rl.policies import Policies, StepInputs
from repro.rl.rollout_receipts import Values, note_rollout, note_step
from repro.rl.rows import Rows
from repro.rl.runs import BatchError, FailedRun, RunStates, TrainResult
from repro.rl.step import StepOutput, step_metrics
from repro.spec.config import TrainScale

# `SinglePolicy` or `StackedPolicies`; measurements also use members of the former.
Trained = TypeVar("Trained", bound=Policies)
# Per run: the row indices of each optimiser step on its rollout; empty without a rollout.
Parts = Sequence[Sequence[Tensor]]
# Per run: (B, T) log-probabilities, or None.
Logprobs = Sequence[Tensor | None]


def train(
    policies: Policies,
    sources: Sequence[Prompts],
    score: Score,
    hooks: Hooks,
    *,
    folder: Path,
    within: Mapping[str, float] | None = None,
) -> list[TrainResult | FailedRun]:
    """Train freshly loaded policies in place, or resume from the last checkpoint in `folder`.

    `sources` yield the prompts of each run, `score` rewards the completions of all runs, and
    `within` are totals of seconds inside phases, shown apart (`WallClock`).
    Returns the result of each run; a `FailedRun` only from policies that freeze failed runs.

    Raises `ValueError` if the checkpoint belongs to other runs.
    """
    clock = WallClock(within)
    training = replace(prepare(policies, sources, score), hooks=hooks, clock=clock)
    return run_steps(policies, partial(iterate, training), hooks, folder=folder, clock=clock)


def everything(rows: Rows) -> Tensor:
    """Return the indices of all rows, (B,) int64."""
    return torch.arange(len(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training(Generic[Trained]):
    """The constant inputs of `iterate`.

    Attributes
    ----------
    sources
        One source of prompts per run.
    taking_part
        Returns the indices of the rows of a rollout that are trained on.
    clock
        Marked at the end of each phase.
    hooks
        Only `on_rollout` and `on_fault` are called.
    """

    policies: Trained
    sources: Sequence[Prompts]
    score: Score
    taking_part: Callable[[Rows], Tensor] = everything
    clock: Clock = field(default_factory=NoClock)
    hooks: Hooks = field(default_factory=Hooks)

    @property
    def scale(self) -> TrainScale:
        """The scale, which all runs share."""
        scale: TrainScale = self.policies.runs[0].scale
        return scale


def prepare(policies: Trained, sources: Sequence[Prompts], score: Score) -> Training[Trained]:
    """Return the inputs of `iterate`."""
    return Training(policies=policies, sources=sources, score=score)


def iterate(t: Training[Trained], state: RunStates) -> list[StepValues]:
    """Make one rollout of every run and the optimiser steps on it; advance `state` by these steps.

    All tiers train with this function; the systems tier times it.

    Returns
    -------
    list
        The logged values of each step, per run.

    Raises `BatchError` where a value that is not finite stops the steps before their optimiser.
    """
    growing = [
        GrowingRollout(run, source, step=state.step, draws=own.draws)
        for run, source, own in zip(t.policies.runs, t.sources, state.runs, strict=True)
    ]
    try:
        return _iterate(t, state, growing)
    except (BatchError, FloatingPointError) as error:
        kept = "" if t.hooks.on_fault is None else t.hooks.on_fault(state.step, growing)
        raise BatchError(f"{error} (rollout of step {state.step + 1}{kept})") from error


def _iterate(
    t: Training[Trained], state: RunStates, growing: Sequence[GrowingRollout]
) -> list[StepValues]:
    step, scale = state.step, t.scale
    started = time.perf_counter()
    with t.policies.perturbed(step, "rollout") as receipts:
        # A run whose rollout cannot be sampled or scored has failed.
        rollouts = collect(growing, state, t.policies.sample, t.score, t.clock)
    state.count_seconds("rollout_seconds", started)
    if t.hooks.on_rollout is not None:
        for run, error in (t.hooks.on_rollout(step, rollouts) or {}).items():
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


def _parts(t: Training[Trained], rollout: Rollout | None) -> Sequence[Tensor]:
    """Divide the rows of a rollout among its optimiser steps."""
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
    """Make all optimiser steps; return their values and the log-probabilities before the first."""
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
            # No step precedes the first: its own pass has given its old log-probabilities.
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
    """Return the inputs of run `s` for optimiser step `number` on the rollout."""
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
    """Return the logged values of one step of a run; None if it made no step."""
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
    """Note the receipts and series of every run with a rollout, up to the step where it failed."""
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
