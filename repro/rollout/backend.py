"""What the machine decides for the engine: which operations, projections and steps.

The one place of the engine that asks about hardware. On a CPU: plain torch and the policy's
own modules. On a GPU: this project's kernels, fused projections, and captured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from repro.rollout.engine_ops import Operations
from repro.rollout.forward import Forward
from repro.rollout.linears import ModuleGroup, ProjectionGroup
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig

if TYPE_CHECKING:
    from repro.rollout.gpu.cuda_backend import Captures


class Steps:
    """Runs decode steps over slots 0 to width - 1, the draw included: as they come, or captured.

    Captured ones are replayed, one per width and way of drawing.
    """

    def __init__(self, forward: Forward, state: RowState, captures: Captures | None) -> None:
        self._forward, self._state, self._captures = forward, state, captures

    def __call__(self, width: int, sampling: SamplingConfig) -> None:
        """Run a step: forward pass, draw, and advance."""
        if self._captures is None:
            self._run(width, sampling)
            return
        greedy = sampling.temperature == 0
        key = width, greedy, 1.0 if greedy else sampling.top_p
        self._captures.run(key, partial(self._run, width, sampling))

    def _run(self, width: int, sampling: SamplingConfig) -> None:
        state = self._state
        logits = self._forward.decode(
            state.tokens[:width], state.positions[:width], state.table[:width]
        )
        self._forward.ops.choose(logits, state, sampling)

    def close(self) -> None:
        """Drop all captures and the memory they hold."""
        if self._captures is not None:
            self._captures.clear()


@dataclass(slots=True)
class Backend:
    """Plain torch, the policy's own modules, steps as they come; a GPU's overrides them.

    Attributes
    ----------
    live_noise
        Keep noise in buffers that are always added, for captured steps.
    captures
        Where steps are captured; None runs them as they come.
    """

    operations: Operations
    live_noise: bool = False
    captures: Captures | None = None

    def group(self, modules: Sequence[nn.Module]) -> ProjectionGroup:
        """Return a projection group of modules that share an input."""
        return ModuleGroup(modules)
