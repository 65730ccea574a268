"""Supervised fine-tuning of S runs: what `repro.rl.supervised` does for one, for all at once.

Every step takes each run's own lessons in its own order, with its own noise on the pass, and the
loss is the mean over the run's own tokens. Lessons lie where the trainer's groups lie, one
completion a prompt, so batches and passes are the trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from repro.ensemble.batch import Batch, make_batch
from repro.ensemble.hooks import FailedRun, Hooks
from repro.ensemble.loop import Loop
from repro.ensemble.noise import added_noise
from repro.ensemble.sampler import StackSampler
from repro.ensemble.stack import Stack
from repro.ensemble.update import Passes
from repro.rl.lessons import Lesson, rows_of
from repro.rl.loop import TrainResult
from repro.rl.receipts import Values
from repro.rl.rows import Rows
from repro.rl.supervised import lessons_of_step, note_lessons, require_supervised
from repro.spec.config import RunConfig


def fine_tune_ensemble(
    runs: Sequence[RunConfig],
    stack: Stack,
    sampler: StackSampler,
    lessons: Sequence[Lesson],
    hooks: Hooks,
    *,
    folder: Path,
    lessons_at_once: int,
) -> list[TrainResult | FailedRun]:
    """Train all runs of a stack on worked solutions, from their last checkpoint if there is one.

    Parameters
    ----------
    runs, stack, sampler, folder
        As of `repro.ensemble.trainer.train_ensemble`.
    lessons
        Of the training split, in its order.
    hooks
        Nothing is scored.
    lessons_at_once
        Lessons of each run in one backward pass.

    Raises
    ------
    ValueError
        When a configuration asks for something that has no meaning here, there are no lessons, or a
        checkpoint is of other runs.
    """
    if not lessons:
        raise ValueError("there are no worked solutions; fine-tuning needs at least one")
    return _Tuning(runs, stack, sampler, lessons, hooks, lessons_at_once).carry_on(folder)


class _Tuning(Loop):
    """The state of an ensemble's fine-tuning and its steps."""

    def __init__(
        self,
        runs: Sequence[RunConfig],
        stack: Stack,
        sampler: StackSampler,
        lessons: Sequence[Lesson],
        hooks: Hooks,
        lessons_at_once: int,
    ) -> None:
        super().__init__(runs, stack, sampler, hooks, lessons_at_once)
        for run in runs:
            require_supervised(run)
        self.lessons = lessons

    def iterate(self) -> None:
        """One optimiser step of every live run."""
        step, states = self.state.step, self.state.runs
        started = time.perf_counter()
        taken = self.guard.each(
            lambda s: rows_of(lessons_of_step(self.runs[s], self.lessons, states[s]))
        )
        noise = added_noise(self.runs, self.stack, step=step)
        losses, entropies = self._accumulate(taken, noise.shared)
        rates = self.rates(step)
        norms = self.move([None] * len(taken), rates, [rows is not None for rows in taken])
        values: list[Values | None] = [None] * len(taken)
        for s, rows in enumerate(taken):
            if rows is None or not self.guard.alive[s]:
                continue
            tokens = int(rows.mask.sum())
            found = {"loss": losses[s] / tokens, "entropy": entropies[s] / tokens}
            moved = {"grad_norm": norms[s], "learning_rate": rates[s]}
            values[s] = note_lessons(states[s], rows, noise.receipts[s], found, moved)
        self.state.step += 1
        self.add_seconds("update_seconds", time.perf_counter() - started)
        if self.hooks.on_step is not None:
            self.hooks.on_step(self.state.step, values)

    def _accumulate(
        self, taken: Sequence[Rows | None], noise: Tensor | None
    ) -> tuple[list[float], list[float]]:
        """Add up gradients of the mean losses; return each run's sums of -log p and of entropy."""
        passes = Passes(
            stack=self.stack,
            rotary=self.rotary,
            temperature=1.0,
            group_size=1,
            groups_at_once=self.groups_at_once,
            noise=noise,
        )
        tokens = [0 if rows is None else int(rows.mask.sum()) for rows in taken]
        losses, entropies = [0.0] * len(taken), [0.0] * len(taken)
        for batch in _batches(taken, self.groups_at_once):
            logprobs, entropy = passes.logprobs(batch)
            weight = [
                torch.full((count,), -1 / max(tokens[s], 1), dtype=logprobs.dtype)
                for s, count in enumerate(batch.counts)
            ]
            logprobs.backward(torch.cat(weight).to(logprobs.device))
            for s, (own, spread) in enumerate(zip(*_by_run(batch, logprobs, entropy), strict=True)):
                losses[s] -= float(own.sum())
                entropies[s] += float(spread.sum())
        return losses, entropies


@torch.no_grad()
def mean_losses(
    stack: Stack, sampler: StackSampler, lessons: Sequence[Lesson], lessons_at_once: int
) -> list[float]:
    """Return each run's mean next-token loss over all completions' tokens, nats, without noise."""
    rows = rows_of(lessons)
    passes = Passes(
        stack=stack,
        rotary=sampler.rotary,
        temperature=1.0,
        group_size=1,
        groups_at_once=lessons_at_once,
    )
    totals = [0.0] * stack.runs
    for batch in _batches([rows] * stack.runs, lessons_at_once):
        logprobs, entropy = passes.logprobs(batch)
        for s, own in enumerate(_by_run(batch, logprobs, entropy)[0]):
            totals[s] -= float(own.sum())
    return [total / int(rows.mask.sum()) for total in totals]


def _batches(taken: Sequence[Rows | None], at_once: int) -> list[Batch]:
    """Return all rows in batches of at most `at_once` of each run."""
    most = max((len(rows) for rows in taken if rows is not None), default=0)
    return [
        make_batch(
            taken,
            [
                [] if rows is None else list(range(begin, min(begin + at_once, len(rows))))
                for rows in taken
            ],
            1,
        )
        for begin in range(0, most, at_once)
    ]


def _by_run(
    batch: Batch, logprobs: Tensor, entropy: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the batch's values run by run, on the host in float64."""
    found = [value.detach().cpu().double().split(batch.counts) for value in (logprobs, entropy)]
    return found[0], found[1]
