"""Where a step's phases end: marks that every tier passes, timed on the device or by the wall.

The trainer calls `mark(phase)` at the end of each phase. Training times them by the wall clock; a
measurement records an event on the device there, so that what is timed is what trains.

    rollout     from the clock's start, or the last mark, to the last sampled token
    reward      completions read and graded
    logprobs    passes for old and reference log-probabilities; a measurement's part of `update`
    update      forward and backward passes
    optimizer   clipping, the optimiser's step, the sampler's refresh
    idle        rows, advantages, receipts; between two steps of training its lines and checkpoint

Easy to get wrong: a host that does not wait for the device ends a phase when its work is launched.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

import torch

Phase = Literal["rollout", "reward", "logprobs", "update", "optimizer", "idle"]
# Those of a measurement.
PHASES: tuple[Phase, ...] = ("rollout", "reward", "update", "optimizer", "idle")
# Where a step's line has the seconds of a phase.
_COLUMNS: dict[Phase, str] = {
    "rollout": "seconds_rollout",
    "reward": "seconds_grading",
    "logprobs": "seconds_logprobs",
    "update": "seconds_update",
    "optimizer": "seconds_update",
    "idle": "seconds_other",
}


class Clock:
    """The clock of a run that is not timed, and the base of those that time one."""

    def mark(self, phase: Phase) -> None:
        """End the phase that began at the last mark."""


class WallClock(Clock):
    """Adds up the wall time of each phase, waiting for the device where one is in use.

    `within` are totals, by column, of seconds that are parts of phases, and may grow: they are
    told apart beside them, as far as they passed in a phase.
    """

    def __init__(self, within: Mapping[str, float]) -> None:
        self._seconds = dict.fromkeys(_COLUMNS.values(), 0.0)
        self._within = within
        self.leave_out()

    def mark(self, phase: Phase) -> None:
        """End the phase that began at the last mark."""
        began, before = self._last, self._parts
        self.leave_out()
        self._seconds[_COLUMNS[phase]] += self._last - began
        for name, total in self._parts.items():
            part = total - before.get(name, 0.0)
            self._seconds[name] = self._seconds.get(name, 0.0) + part

    def leave_out(self) -> None:
        """Let the next phase begin now: what passed since the last mark belongs to none."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._last, self._parts = time.perf_counter(), dict(self._within)

    def take(self, steps: int) -> dict[str, float]:
        """Return the seconds since the last call by column, as the share of each of `steps`."""
        taken = {name: round(seconds / steps, 6) for name, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(taken, 0.0)
        return taken
