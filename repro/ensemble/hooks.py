"""What an ensemble's training asks of its caller, and what becomes of a run that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from repro.ensemble.collecting import ScoreTogether
from repro.rl.receipts import Values

EvaluateTogether = Callable[[int, Sequence[bool]], Sequence[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that ended early.

    Attributes
    ----------
    step
        Optimiser steps that it had done.
    reason
        Kind and message of what ended it.
    """

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hooks:
    """What the loop asks of its caller.

    Attributes
    ----------
    score
        Rewards of all runs' completions at once.
    evaluate
        Held-out accuracy of each run, in percent, after so many steps; asked without added noise.
        None evaluates nothing.
    on_step
        Called with the steps done and one dictionary of values a run, None for frozen ones.
    should_stop
        Asked before each rollout; True writes a checkpoint and returns.
    """

    score: ScoreTogether
    evaluate: EvaluateTogether | None = None
    on_step: Callable[[int, Sequence[Values | None]], None] | None = None
    should_stop: Callable[[], bool] | None = None
