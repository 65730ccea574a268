"""Where a step's phases end: marks that every tier passes and that the systems tier times.

The trainer calls `mark(phase)` at the end of each phase. Training ignores it; a measurement records
an event on the device there, so that what is timed is what trains.

    rollout     from the clock's start, or the last mark, to the last sampled token
    reward      completions read and graded
    update      forward and backward passes, of old and reference log-probabilities too
    optimizer   clipping, the optimiser's step, the sampler's refresh
    idle        rows, advantages, receipts: the host works and the device waits
"""

from __future__ import annotations

from typing import Literal, Protocol

Phase = Literal["rollout", "reward", "update", "optimizer", "idle"]
PHASES: tuple[Phase, ...] = ("rollout", "reward", "update", "optimizer", "idle")


class Clock(Protocol):
    """Takes the time, or does not."""

    def mark(self, phase: Phase) -> None:
        """End the phase that began at the last mark."""
        ...


class NoClock:
    """The clock of a run that is not timed."""

    def mark(self, phase: Phase) -> None:
        """Do nothing."""
