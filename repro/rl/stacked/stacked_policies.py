"""S policies that train as one batched model: `repro.rl.policies.Policies` over a stack.

Only the work on the device is batched; problems, seeds, noise, loss, rewards and metrics are
computed for each run by the code for single runs. A run that fails is frozen; its rows stay idle.

If memory runs out, the accumulated gradients are cleared and the passes start over with half as
many tokens per run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from repro.rl.collect import BatchRequest, Rollout
from repro.rl.noise import NoiseReceipt
from repro.rl.policies import During, StepInputs, keeps_start
from repro.rl.rollout_receipts import Values, at_most_what_fitted, note_smaller_batches
from repro.rl.rows import Rows
from repro.rl.runs import RunStates
from repro.rl.single_run.optimizers import build_optimizer, require_finite
from repro.rl.stacked.batch import largest_group
from repro.rl.stacked.stack import Stack
from repro.rl.stacked.stacked_noise import AddedNoise, added_noise
from repro.rl.stacked.stacked_sampler import SampleRequest, StackedSampler
from repro.rl.stacked.update import (
    Passes,
    RunStep,
    accumulate_gradients,
    evaluate_runs,
    plan_run,
)
from repro.rl.step import StepOutput, within_memory
from repro.rl.training_checkpoint import load_checkpoint, save_checkpoint
from repro.rollout.sampler import Completion
from repro.spec.config import RunConfig, TrainScale
from repro.spec.schedule import learning_rate_of_run

Result = TypeVar("Result")


class StackedPolicies:
    """The policies of a new stack, trained in place, with their optimiser and sampler.

    There is one run per policy; `repro.rl.stacked.grouping` says what they must have in common.
    `tokens_at_once` is the number of padded tokens per run in one backward pass.

    Raises `ValueError` if the stack trains nothing, or with another optimiser than AdamW.
    """

    freeze = True

    def __init__(
        self, runs: Sequence[RunConfig], stack: Stack, sampler: StackedSampler, tokens_at_once: int
    ) -> None:
        if stack.masters is None:
            raise ValueError("the stack's runs train nothing; training needs LoRA or full ones")
        self.runs, self.stack, self.sampler = runs, stack, sampler
        self.scale: TrainScale = runs[0].scale
        name = self.scale.optimizer.name
        if name != "adamw":
            raise ValueError(f"optimizer is {name}; an ensemble has adamw")
        self.masters = stack.masters
        # One parameter per run, so that each has its own learning rate and gradient norm.
        self.rows = {f"run {s}": nn.Parameter(row) for s, row in enumerate(self.masters.values)}
        self.optimizer = build_optimizer(self.rows, self.scale.optimizer, rates_apart=True)
        self.tokens_at_once = tokens_at_once
        # Copied before a checkpoint is loaded, because the reference is the initial policy.
        needs_start = any(keeps_start(run) for run in runs)
        self.reference = self.masters.values.clone() if needs_start else None
        # Drawn once per step, for its rollout and its update.
        self._drawn: tuple[int, AddedNoise] | None = None
        self._on_passes: Tensor | None = None

    @contextmanager
    def perturbed(self, step: int, during: During) -> Iterator[Sequence[NoiseReceipt]]:
        """Add the step's noise to the sampler's gains or the passes'; see `Policies.perturbed`."""
        noise = self._noise_of(step)
        if during == "rollout":
            if noise.rollout is not None:
                self.sampler.refresh(noise.rollout)
            yield noise.receipts
            return
        self._on_passes = noise.shared
        try:
            yield noise.receipts
        finally:
            self._on_passes = None

    def sample(self, asked: Sequence[BatchRequest | None]) -> list[Sequence[Completion] | None]:
        """Sample all runs' completions at once; see `Policies.sample`."""
        requests = [
            None if one is None else SampleRequest(prompts=one.prompts, seeds=one.seeds)
            for one in asked
        ]
        sampled = self.sampler.sample(
            requests, self.runs[0].rollout, group_size=self.scale.group_size
        )
        return [None if batch is None else batch.completions for batch in sampled]

    def refresh(self) -> None:
        """See `Policies.refresh`."""
        self.sampler.refresh()

    def old_logprobs(
        self,
        rollouts: Sequence[Rollout | None],
        parts: Sequence[Sequence[Tensor]],
        state: RunStates,
    ) -> list[Tensor | None]:
        """Evaluate all rows: the runs' first steps are on different rows."""
        into = _empty(_rows(rollouts))
        if max(len(own) for own in parts) > 1:
            self._evaluate(rollouts, into, state)
        return _logprobs(into)

    def reference_logprobs(
        self, rollouts: Sequence[Rollout | None], state: RunStates
    ) -> list[Tensor | None]:
        """See `Policies.reference_logprobs`."""
        asking = [
            rollout if run.arm.loss.beta > 0 else None
            for run, rollout in zip(self.runs, rollouts, strict=True)
        ]
        into = _empty(_rows(asking))
        if any(r is not None and len(r.rows) for r in asking):
            with self._as_started():
                self._evaluate(asking, into, state)
        return _logprobs(into)

    def backward(
        self, parts: Sequence[StepInputs | None], state: RunStates
    ) -> list[StepOutput | None]:
        """Run the passes of all runs together, with a loss per run; see `Policies.backward`."""

        def attempt(tokens: int) -> list[RunStep | None]:
            planned = state.each(lambda s: plan_run(parts[s]))
            accumulate_gradients(self._passes(tokens), planned)
            return planned

        rows = _rows([None if part is None else part.rollout for part in parts])
        planned = self._fitting(rows, self.scale.group_size, attempt, state)
        for s, step in enumerate(planned):
            if step is not None and step.failure is not None:
                state.fail(s, step.failure)
        return [
            None if step is None or step.failure is not None else step.output() for step in planned
        ]

    def step(self, state: RunStates, step: int) -> list[Values | None]:
        """Clip and step every live run, each by its own gradient norm; see `Policies.step`."""
        rates = [learning_rate_of_run(run, step) for run in self.runs]
        for row, gradient in zip(self.rows.values(), self.masters.gradients, strict=True):
            row.grad = gradient
        most = self.scale.optimizer.max_grad_norm
        clipped = [nn.utils.clip_grad_norm_([row], most) for row in self.rows.values()]
        norms: list[float] = torch.stack(clipped).tolist()
        state.each(lambda s: require_finite(norms[s]))
        groups = zip(self.optimizer.param_groups, rates, state.alive, strict=True)
        for group, rate, lives in groups:
            group["lr"] = rate
            if not lives:
                group["params"][0].grad = None
        self.optimizer.step()
        self.masters.gradients.zero_()
        return state.each(lambda s: {"grad_norm": norms[s], "learning_rate": rates[s]})

    def save(self, folder: Path, state: RunStates) -> None:
        """See `Policies.save`."""
        save_checkpoint(folder, state, self.rows, self.optimizer)

    def load(self, folder: Path) -> RunStates | None:
        """See `Policies.load`; passes continue with the number of tokens that last fitted."""
        digests = [run.digest() for run in self.runs]
        state = load_checkpoint(folder, digests, self.rows, self.optimizer, freeze=self.freeze)
        for run in () if state is None else state.runs:
            self.tokens_at_once = at_most_what_fitted(run, self.tokens_at_once)
        return state

    @contextmanager
    def _as_started(self) -> Iterator[None]:
        """Let passes use the initial weights inside a `with` block."""
        if self.reference is None:
            raise ValueError("the policies before training were not kept; no run asks for them")
        trained = self.masters.values.clone()
        try:
            self.masters.values.copy_(self.reference)
            yield
        finally:
            self.masters.values.copy_(trained)

    def _noise_of(self, step: int) -> AddedNoise:
        if self._drawn is None or self._drawn[0] != step:
            self._drawn = step, added_noise(self.runs, self.stack, step=step)
        return self._drawn[1]

    def _passes(self, tokens: int) -> Passes:
        return Passes(
            stack=self.stack,
            rotary=self.sampler.rotary,
            temperature=self.runs[0].rollout.temperature,
            group_size=self.scale.group_size,
            tokens_at_once=tokens,
            noise=self._on_passes,
        )

    def _evaluate(
        self,
        rollouts: Sequence[Rollout | None],
        into: Sequence[tuple[Tensor, Tensor] | None],
        state: RunStates,
    ) -> None:
        """Write log-probabilities and entropies of all rows of the rollouts into `into`."""
        rows = _rows(rollouts)
        every = torch.arange(max(len(own) for own in rows if own is not None))
        self._fitting(
            rows,
            self.scale.group_size,
            lambda tokens: evaluate_runs(self._passes(tokens), rows, every, into),
            state,
        )

    def _fitting(
        self,
        rows: Sequence[Rows | None],
        size: int,
        attempt: Callable[[int], Result],
        state: RunStates,
    ) -> Result:
        """Run passes with as many tokens at once as memory allows, and note any reduction.

        Later passes begin with the number that fitted.

        Parameters
        ----------
        rows
            The rows of the passes, in groups of `size`.
        """
        largest = largest_group(rows, size)
        whole = largest * max((len(own) for own in rows if own is not None), default=1) // size
        first = min(self.tokens_at_once, whole)
        result, fitting = within_memory(
            attempt,
            first,
            smallest=lambda tokens: tokens <= largest,
            forget=self.masters.gradients.zero_,
        )
        if fitting < first:
            self.tokens_at_once = fitting
        for run, lives in zip(state.runs, state.alive, strict=True):
            if lives:
                note_smaller_batches(run, state.step, first, fitting)
        return result


def _rows(rollouts: Sequence[Rollout | None]) -> list[Rows | None]:
    return [None if rollout is None else rollout.rows for rollout in rollouts]


def _empty(taken: Sequence[Rows | None]) -> list[tuple[Tensor, Tensor] | None]:
    """Return zeros (B, T) for the log-probabilities of each run's rows, and for their entropies."""
    shapes = [None if rows is None else rows.mask.shape for rows in taken]
    return [None if shape is None else (torch.zeros(shape), torch.zeros(shape)) for shape in shapes]


def _logprobs(pairs: Sequence[tuple[Tensor, Tensor] | None]) -> list[Tensor | None]:
    return [None if pair is None else pair[0] for pair in pairs]
