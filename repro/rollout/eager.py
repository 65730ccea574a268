"""How decode steps and prefills are run, and the way without captures: each as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from repro.rollout.forward import Forward
from repro.rollout.prefill import new_tokens
from repro.rollout.scheduler import Segment
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


class Prefills(Protocol):
    """Runs a chunk of a prefill."""

    def __call__(self, segments: Sequence[Segment]) -> int:
        """Fill the cache with the segments' keys and values; return the tokens of padding."""
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


class EagerPrefills:
    """Runs each chunk as it comes, without padding."""

    def __init__(self, forward: Forward, state: RowState) -> None:
        self._forward, self._state = forward, state

    def __call__(self, segments: Sequence[Segment]) -> int:
        """Run the forward pass."""
        state, block_size = self._state, self._forward.block_size
        tokens, new = new_tokens(segments, block_size, state.table.shape[1], state.push)
        self._forward.prefill(tokens, new)
        return 0
