"""The state of a run in training, besides tensors, and its result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from repro.spec.config import RunConfig


class BatchError(ValueError):
    """No step can be made on a batch: something is not finite, or not rewarded; on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a training run.

    Attributes
    ----------
    finished
        False if `should_stop` ended it; the same call resumes from its checkpoint.
    step
        Optimiser steps done.
    series
        `{name: [one value per step]}`, None where a step has no value; `evaluation_step`,
        `evaluation_accuracy` and `evaluation_tokens` (sampled so far) have one per evaluation.
    """

    finished: bool
    step: int
    series: dict[str, list[float | int | None]]
    facts: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The state of a run besides tensors; grows with every step.

    Attributes
    ----------
    draws
        Batches of prompts drawn; more than rollouts where dynamic sampling refills.
    series
        `{name: [one value per step]}`.
    counts
        Counts of the process for the run when the checkpoint was written; see
        `repro.rl.rollout_receipts.Tally`.
    """

    digest: str
    step: int
    draws: int
    series: dict[str, list[float | int | None]]
    facts: dict[str, Any]
    counts: dict[str, Any] = field(default_factory=dict)

    def count_seconds(self, name: str, started: float) -> None:
        """Add the seconds since `started` to a named total."""
        seconds = self.facts.setdefault("seconds", {})
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


def fresh_state(run: RunConfig) -> TrainState:
    """Return the state of a run that has made no step."""
    return TrainState(digest=run.digest(), step=0, draws=0, series={}, facts={})
