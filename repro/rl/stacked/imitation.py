"""Worked solutions of S runs: gradients of each run's mean loss, and losses without gradient.

Lessons lie where the trainer's groups lie, one completion per prompt, so batches and passes are the
trainer's. The loss of a run is the mean over its own tokens of -log p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from repro.rl.lessons import SFTExample, rows_of
from repro.rl.policies import SFTStats
from repro.rl.rows import Rows
from repro.rl.stacked.batch import Batch
from repro.rl.stacked.update import Passes


def accumulate_losses(passes: Passes, taken: Sequence[Rows | None]) -> list[SFTStats | None]:
    """Add up gradients of the mean losses; return each run's means.

    Passes are at temperature 1, with a completion per group; `taken` has each run's lessons of the
    step, None where it takes no part.
    """
    tokens = [0 if rows is None else int(rows.mask.sum()) for rows in taken]
    loss_sums, entropy_sums = [0.0] * len(taken), [0.0] * len(taken)
    for batch in _batches(passes, taken):
        logprobs, entropies = passes.logprobs(batch)  # (n,) each, run by run
        weight = [
            torch.full((count,), -1 / max(tokens[s], 1), dtype=logprobs.dtype)
            for s, count in enumerate(batch.counts)
        ]
        logprobs.backward(torch.cat(weight).to(logprobs.device))
        for s, of_run in enumerate(_by_run(batch, logprobs)):
            loss_sums[s] -= float(of_run.sum())
        for s, of_run in enumerate(_by_run(batch, entropies)):
            entropy_sums[s] += float(of_run.sum())
    return [
        SFTStats(loss=loss_sums[s] / tokens[s], entropy=entropy_sums[s] / tokens[s])
        if tokens[s]
        else None
        for s in range(len(taken))
    ]


@torch.no_grad()
def mean_losses(passes: Passes, lessons: Sequence[SFTExample]) -> list[float]:
    """Return each run's mean next-token loss over all completions' tokens, nats."""
    rows, runs = rows_of(lessons), passes.stack.runs
    totals = [0.0] * runs
    for batch in _batches(passes, [rows] * runs):
        logprobs, _ = passes.logprobs(batch)
        for s, of_run in enumerate(_by_run(batch, logprobs)):
            totals[s] -= float(of_run.sum())
    return [total / int(rows.mask.sum()) for total in totals]


def _batches(passes: Passes, taken: Sequence[Rows | None]) -> list[Batch]:
    """Return all rows, each a group, in the passes' micro-batches."""
    every = [[] if rows is None else list(range(len(rows))) for rows in taken]
    return [batch for _, batch in passes.batches(taken, every, learning=max(map(len, every)))]


def _by_run(batch: Batch, values: Tensor) -> tuple[Tensor, ...]:
    """Return the batch's values (n,) run by run, on the host in float64."""
    return values.detach().cpu().double().split(batch.counts)
