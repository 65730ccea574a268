"""How decode steps are run, and the way without captures: each as it comes."""

from __future__ import annotations

from typing import Protocol

from repro.rollout.forward import Forward
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig


class Steps(Protocol):
    """Runs one decode step over slots 0 to width - 1, the draw included."""

    def __call__(self, width: int, sampling: SamplingConfig) -> None:
        """Run the step."""
        ...

    def close(self) -> None:
        """Give back what was captured."""
        ...


class EagerSteps:
    """Runs each step as it comes."""

    def __init__(self, forward: Forward, state: RowState) -> None:
        self._forward, self._state = forward, state

    def __call__(self, width: int, sampling: SamplingConfig) -> None:
        """Run the forward pass, draw, and advance."""
        state = self._state
        logits = self._forward.decode(
            state.tokens[:width], state.positions[:width], state.table[:width]
        )
        self._forward.ops.choose(logits, state, sampling)

    def close(self) -> None:
        """Nothing was captured."""
