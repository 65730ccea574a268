"""The training loop of S runs: what `repro.rl.trainer` does for one, step by step for all.

Every step: noise of each run, one sampling of all runs' prompts, rewards, advantages run by run,
one batched update, receipts run by run. The pieces are `repro.rl`'s own, so a run that is trained
here is the run that it would have been alone, up to the order of floating-point sums (and, in
16 bits, their rounding).

A run that fails (a gradient that is not finite, a rollout that cannot be scored) is frozen: its
step and reason are kept, its rows idle, and the others go on.

Easy to get wrong: dynamic sampling needs further rounds for some runs only; the others idle in
them, and draw nothing, so that their random numbers stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from repro.data.problem import Problem
from repro.ensemble.collecting import collect_together
from repro.ensemble.hooks import FailedRun, Hooks
from repro.ensemble.loop import Loop
from repro.ensemble.noise import AddedNoise, added_noise
from repro.ensemble.sampler import StackSampler
from repro.ensemble.stack import Stack
from repro.ensemble.update import (
    Passes,
    RunStep,
    accumulate_gradients,
    evaluate_runs,
    plan_run,
)
from repro.rl.collect import GrowingRollout, PromptSource, Rollout
from repro.rl.loop import TrainResult
from repro.rl.receipts import Values, note_rollout, note_step
from repro.rl.step import step_metrics
from repro.rl.trainer import require_trainable
from repro.spec.config import RunConfig

# By the rows of a rollout: the rows of each of its optimiser steps.
Parts = Mapping[int, Sequence[Tensor]]


def train_ensemble(
    runs: Sequence[RunConfig],
    stack: Stack,
    sampler: StackSampler,
    problems: Sequence[Problem],
    hooks: Hooks,
    *,
    folder: Path,
    groups_at_once: int,
) -> list[TrainResult | FailedRun]:
    """Train all runs of a stack, from their last checkpoint if `folder` holds one.

    Parameters
    ----------
    runs
        One a policy of the stack, alike in what `repro.ensemble.grouping` says.
    stack
        Freshly stacked; trained in place.
    sampler
        Of the stack.
    problems
        The training split.
    folder
        Of the ensemble's checkpoints.
    groups_at_once
        Groups of each run in one backward pass.

    Raises
    ------
    ValueError
        When the configurations cannot be trained together, or a checkpoint is of other runs.
    """
    loop = _Loop(runs, stack, sampler, problems, hooks, groups_at_once)
    return loop.carry_on(folder)


class _Loop(Loop):
    """The state of an ensemble's training and its steps."""

    def __init__(
        self,
        runs: Sequence[RunConfig],
        stack: Stack,
        sampler: StackSampler,
        problems: Sequence[Problem],
        hooks: Hooks,
        groups_at_once: int,
    ) -> None:
        super().__init__(runs, stack, sampler, hooks, groups_at_once)
        for run in runs:
            require_trainable(run)
        self.sources = [PromptSource(problems, stack.tokenizer, run) for run in runs]
        # Copied before a checkpoint is loaded: the reference is the policy before training.
        needs_reference = any(run.arm.loss.beta > 0 for run in runs)
        masters = self.optimizer.masters
        self.reference = masters.values.clone() if needs_reference else None

    def iterate(self) -> None:
        """One rollout of every run and its updates; the state moves on by as many steps."""
        step = self.state.step
        started = time.perf_counter()
        noise = added_noise(self.runs, self.stack, step=step)
        self.sampler.refresh(noise.rollout)
        rollouts = self._collect(step)
        rolled = time.perf_counter()
        updates = min(self.scale.updates_per_rollout, self.scale.steps - step)
        steps = self._update(rollouts, noise, updates)
        self.add_seconds("rollout_seconds", rolled - started)
        self.add_seconds("update_seconds", time.perf_counter() - rolled)
        for values in steps:
            self.state.step += 1
            if self.hooks.on_step is not None:
                self.hooks.on_step(self.state.step, values)

    def _collect(self, step: int) -> list[Rollout | None]:
        """Sample and score every live run's rollout; a run that cannot is frozen."""
        growing = [
            GrowingRollout(run, source, step=step, draws=state.draws)
            for run, source, state in zip(self.runs, self.sources, self.state.runs, strict=True)
        ]
        return collect_together(
            growing, self.guard, self.sampler, self.hooks.score, self.scale, self.stack.tokenizer
        )

    def _passes(self, noise: AddedNoise) -> Passes:
        return Passes(
            stack=self.stack,
            rotary=self.rotary,
            temperature=self.scale.rollout.temperature,
            group_size=self.scale.group_size,
            groups_at_once=self.groups_at_once,
            noise=noise.shared,
        )

    def _update(
        self, rollouts: Sequence[Rollout | None], noise: AddedNoise, updates: int
    ) -> list[list[Values | None]]:
        """Make a rollout's optimiser steps; return each one's values, one dictionary a run."""
        scale = self.scale
        rows = scale.prompts_per_rollout * scale.group_size
        before = [None if r is None else _empty(r) for r in rollouts]
        parts = {
            count: torch.arange(count).tensor_split(scale.updates_per_rollout)[:updates]
            for count in {len(r.rows) for r in rollouts if r is not None} | {rows}
        }
        # The first part's own pass will serve as its old log-probabilities: the ratio is 1 to the
        # bit. Which rows that part has depends on the run, so all are evaluated.
        if updates > 1:
            evaluate_runs(self._passes(noise), rollouts, torch.arange(rows), before)
        reference = self._reference_logprobs(self._passes(noise), rollouts)
        steps: list[list[Values | None]] = []
        for number in range(updates):
            plan = partial(self._planned, rollouts, parts, number, before, reference)
            planned = self._accumulate(plan, noise)
            steps.append(self._move(planned, self.state.step + number))
            if number == 0:
                for s, step in enumerate(planned):
                    kept = before[s]
                    if step is not None and kept is not None:
                        kept[0][step.plan.index] = step.logprobs[step.plan.index]
        self._note(rollouts, noise, steps, before, parts)
        return steps

    def _accumulate(
        self, plan: Callable[[int], RunStep | None], noise: AddedNoise
    ) -> list[RunStep | None]:
        """Plan every run's step and add up its gradients; again with less where memory runs out."""
        while True:
            planned = self.guard.each(plan)
            try:
                accumulate_gradients(self._passes(noise), planned)
            except torch.OutOfMemoryError:
                if self.groups_at_once == 1:
                    raise
            else:
                return planned
            self._take_fewer_groups()

    def _take_fewer_groups(self) -> None:
        """Halve the groups of a backward pass, and forget what the failed one had added up."""
        wanted, self.groups_at_once = self.groups_at_once, self.groups_at_once // 2
        self.optimizer.masters.gradients.zero_()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for state, lives in zip(self.state.runs, self.guard.alive, strict=True):
            if lives:
                noted = state.effects.setdefault("groups_at_once_fallbacks", [])
                noted.append([self.state.step, wanted, self.groups_at_once])

    def _planned(
        self,
        rollouts: Sequence[Rollout | None],
        parts: Parts,
        number: int,
        before: Sequence[tuple[Tensor, Tensor] | None],
        reference: Sequence[Tensor | None],
        s: int,
    ) -> RunStep | None:
        """Return run `s`'s part in the rollout's optimiser step of that number."""
        rollout, pair = rollouts[s], before[s]
        if rollout is None or pair is None:
            return None
        old = None if number == 0 else pair[0]
        index = parts[len(rollout.rows)][number]
        return plan_run(self.runs[s], rollout, index, old=old, ref=reference[s])

    def _move(self, planned: Sequence[RunStep | None], step: int) -> list[Values | None]:
        """Clip and step every run; return each one's metrics, None for frozen ones."""
        rates = self.rates(step)
        norms = self.move(
            [None if found is None else found.failure for found in planned],
            rates,
            [found is not None for found in planned],
        )
        return [
            step_metrics(found.rollout, found.plan, found.output())
            | {"grad_norm": norms[s], "learning_rate": rates[s]}
            if found is not None and self.guard.alive[s]
            else None
            for s, found in enumerate(planned)
        ]

    def _reference_logprobs(
        self, passes: Passes, rollouts: Sequence[Rollout | None]
    ) -> list[Tensor | None]:
        """Return (B, T) log-probabilities under the weights before training, where a run asks."""
        masters, reference = self.stack.masters, self.reference
        none: list[Tensor | None] = [None] * len(rollouts)
        if reference is None or masters is None:
            return none
        asking = [
            rollout if run.arm.loss.beta > 0 else None
            for run, rollout in zip(self.runs, rollouts, strict=True)
        ]
        if not any(rollout is not None and len(rollout.rows) for rollout in asking):
            return none
        into = [None if rollout is None else _empty(rollout) for rollout in asking]
        held = masters.values.clone()
        try:
            masters.values.copy_(reference)
            longest = max(len(rollout.rows) for rollout in asking if rollout is not None)
            evaluate_runs(passes, asking, torch.arange(longest), into)
        finally:
            masters.values.copy_(held)
        return [None if pair is None else pair[0] for pair in into]

    def _note(
        self,
        rollouts: Sequence[Rollout | None],
        noise: AddedNoise,
        steps: Sequence[list[Values | None]],
        before: Sequence[tuple[Tensor, Tensor] | None],
        parts: Parts,
    ) -> None:
        """Write receipts and series of every run that came through the rollout's updates."""
        for s, rollout in enumerate(rollouts):
            state, pair = self.state.runs[s], before[s]
            if rollout is None or pair is None:
                continue
            state.draws += rollout.batches
            done = torch.cat(list(parts[len(rollout.rows)]))
            once = note_rollout(self.runs[s], state, rollout, noise.receipts[s], pair[0], done)
            for values in steps:
                found = values[s]
                if found is None:
                    break
                found |= once
                note_step(state, found)


def _empty(rollout: Rollout) -> tuple[Tensor, Tensor]:
    return torch.zeros(rollout.rows.mask.shape), torch.zeros(rollout.rows.mask.shape)
