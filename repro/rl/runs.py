"""State of runs that train together, besides tensors, and the handling of a failed run.

A single run may fail, by a rollout that cannot be scored or a gradient that is not finite. In an
ensemble it is frozen: the reason is kept, its rows idle, and the other runs continue. A run that
trains alone is not frozen; its error ends the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from repro.spec.config import RunConfig

# Errors of a single run; any other error is a fault of the program and ends all runs.
RUN_FAILURES = (ValueError, ArithmeticError)

Result = TypeVar("Result")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that ended early, after `step` optimiser steps.

    `reason` is the kind and message of the error.
    """

    step: int
    reason: str


def reason_of(error: Exception) -> str:
    """Return the reason of an early end: the error's kind and message."""
    return f"{type(error).__name__}: {error}"


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


@dataclass(slots=True, kw_only=True)
class RunStates:
    """The state of all runs besides tensors; grows with every step.

    Attributes
    ----------
    runs
        One state per run; that of a frozen run no longer changes.
    failures
        One per run: why it was frozen, or None.
    freeze
        Whether a run that fails is frozen; else its error is raised.
    """

    step: int
    runs: list[TrainState]
    failures: list[str | None]
    freeze: bool = True

    @property
    def alive(self) -> list[bool]:
        """Which runs have not failed."""
        return [failure is None for failure in self.failures]

    def fail(self, run: int, error: Exception) -> None:
        """Freeze a run, or raise its error."""
        if not self.freeze:
            raise error
        self.failures[run] = reason_of(error)

    def each(self, work: Callable[[int], Result]) -> list[Result | None]:
        """Return `work(s)` of every live run, None for the others and for those that fail in it."""
        results: list[Result | None] = [None] * len(self.runs)
        for s, lives in enumerate(self.alive):
            if lives:
                try:
                    results[s] = work(s)
                except RUN_FAILURES as error:
                    self.fail(s, error)
        return results

    def count_seconds(self, name: str, started: float) -> None:
        """Add to a named total of each live run its share of the seconds since `started`."""
        elapsed, living = time.perf_counter() - started, sum(self.alive)
        for run, lives in zip(self.runs, self.alive, strict=True):
            if lives:
                seconds = run.facts.setdefault("seconds", {})
                seconds[name] = seconds.get(name, 0.0) + elapsed / living


def fresh_states(runs: Sequence[RunConfig], *, freeze: bool) -> RunStates:
    """Return the states of runs that have made no step."""
    states = [TrainState(digest=run.digest(), step=0, draws=0, series={}, facts={}) for run in runs]
    return RunStates(step=0, runs=states, failures=[None] * len(runs), freeze=freeze)
