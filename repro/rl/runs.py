"""State of runs that train together, besides tensors, and the handling of a failed run.

A run may fail by itself: a rollout that cannot be scored, a gradient that is not finite. Among
others it is frozen: its reason is kept, its rows idle, and the others go on. A run that trains by
itself is not frozen; its error ends the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from repro.spec.config import RunConfig

# What a run may raise by itself; anything else is a fault of the program and ends all.
RUN_FAILURES = (ValueError, ArithmeticError)

Result = TypeVar("Result")


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
        `{name: [one value per step]}`, None where a step has no value; `evaluation_step`,
        `evaluation_accuracy` and `evaluation_tokens` (sampled so far) have one per evaluation.
    """

    finished: bool
    step: int
    series: dict[str, list[float | int | None]]
    effects: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that ended early, after `step` optimiser steps.

    `reason` is the kind and message of what ended it.
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
        What the process had counted for the run beside its steps, when the checkpoint was written;
        see `repro.rl.rollout_receipts.Tally`.
    """

    digest: str
    step: int
    draws: int
    series: dict[str, list[float | int | None]]
    effects: dict[str, Any]
    counts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class RunStates:
    """The state of all runs besides tensors; grows with every step.

    Attributes
    ----------
    runs
        One state per run; a frozen run's stays behind.
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
                seconds = run.effects.setdefault("seconds", {})
                seconds[name] = seconds.get(name, 0.0) + elapsed / living


def fresh_states(runs: Sequence[RunConfig], *, freeze: bool) -> RunStates:
    """Return the states of runs that have made no step."""
    states = [
        TrainState(digest=run.digest(), step=0, draws=0, series={}, effects={}) for run in runs
    ]
    return RunStates(step=0, runs=states, failures=[None] * len(runs), freeze=freeze)
