"""Decode steps without captures: each as it comes."""

from __future__ import annotations

from repro.rollout.forward import Forward
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig


class EagerSteps:
    """Runs each decode step as it comes, over slots 0 to width - 1, the draw included."""

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
        """Give back what was captured: nothing."""
