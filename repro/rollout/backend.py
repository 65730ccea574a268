"""What the machine decides for the engine: which operations, projections and steps.

The one place of the engine that asks about hardware. On a CPU: plain torch and the policy's
own modules. On a GPU: this project's kernels, fused projections, and captured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from repro.rollout.engine_ops import Operations
from repro.rollout.forward import Forward
from repro.rollout.linears import ModuleGroup, ProjectionGroup
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


@dataclass(slots=True)
class Backend:
    """Plain torch, the policy's own modules, steps as they come; a GPU's overrides them.

    `live_noise`: noise is read from buffers, so that captured steps see it.
    """

    cache_dtype: torch.dtype
    operations: Operations
    live_noise: bool = False

    def group(self, modules: Sequence[nn.Module]) -> ProjectionGroup:
        """Return a projection group of modules that share an input."""
        return ModuleGroup(modules)

    def steps(self, forward: Forward, state: RowState) -> EagerSteps:
        """Return the decode steps."""
        return EagerSteps(forward, state)
