"""What the machine decides for the engine: which operations, projections and steps.

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
from repro.rollout.eager import EagerSteps, Steps
from repro.rollout.engine_config import EngineConfig, cache_dtype
from repro.rollout.forward import Forward
from repro.rollout.linears import ModuleGroup, ProjectionGroup
from repro.rollout.ops import Operations
from repro.rollout.state import RowState


class Backend(Protocol):
    """Everything that differs between machines."""

    operations: Operations
    live_noise: bool
    cache_dtype: torch.dtype

    def group(self, modules: Sequence[nn.Module]) -> ProjectionGroup:
        """Return a projection group of modules that share an input."""
        ...

    def steps(self, forward: Forward, state: RowState) -> Steps:
        """Return the decode steps."""
        ...


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


def backend_for(policy: Policy, config: EngineConfig) -> Backend:
    """Return the backend for the policy's device."""
    if policy.device.type == "cuda":
        from repro.rollout.gpu.cuda_backend import GpuBackend

        return GpuBackend(policy, config)
    return TorchBackend(cache_dtype=cache_dtype(policy, config), operations=Operations())
