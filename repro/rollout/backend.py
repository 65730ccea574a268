"""What the machine decides for the engine: which operations, projections, steps and prefills.

The one place of the engine that asks about hardware. On a CPU: plain torch and the policy's
own modules. On a GPU: this project's kernels, fused projections, and captured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from repro.models.policy import Policy
from repro.rollout.engine_config import EngineConfig, cache_dtype
from repro.rollout.forward import Forward
from repro.rollout.linears import ModuleGroup, ProjectionGroup
from repro.rollout.ops import Operations
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


class Backend(Protocol):
    """Everything that differs between machines."""

    operations: Operations
    live_noise: bool
    cache_dtype: torch.dtype

    def group(self, modules: Sequence[nn.Module]) -> ProjectionGroup:
        """Return a projection group of modules that share an input."""
        ...

    def steps(self, forward: Forward, state: RowState) -> Steps:
        """Return what runs decode steps."""
        ...

    def prefills(self, forward: Forward, state: RowState) -> Prefills:
        """Return what runs prefills."""
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


@dataclass(slots=True)
class TorchBackend:
    """Plain torch, the policy's own modules, steps as they come."""

    cache_dtype: torch.dtype
    operations: Operations
    live_noise: bool = False

    def group(self, modules: Sequence[nn.Module]) -> ProjectionGroup:
        """Return a group that calls the modules."""
        return ModuleGroup(modules)

    def steps(self, forward: Forward, state: RowState) -> Steps:
        """Return eager steps."""
        return EagerSteps(forward, state)

    def prefills(self, forward: Forward, state: RowState) -> Prefills:
        """Return eager prefills."""
        return EagerPrefills(forward, state)


def backend_for(policy: Policy, config: EngineConfig) -> Backend:
    """Return the backend for the policy's device."""
    if policy.device.type == "cuda":
        from repro.rollout.gpu_backend import GpuBackend

        return GpuBackend(policy, config)
    return TorchBackend(cache_dtype=cache_dtype(policy, config), operations=Operations())
