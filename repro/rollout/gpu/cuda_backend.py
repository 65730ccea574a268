"""The engine's backend on a GPU: kernels, fused projections, captured steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from repro.models.lora import base_linear
from repro.models.policy import Policy
from repro.rollout.eager import Steps
from repro.rollout.engine_config import EngineConfig, cache_dtype
from repro.rollout.forward import Forward
from repro.rollout.gpu.bitsandbytes_linears import BitsandbytesGroup
from repro.rollout.gpu.fused_linears import DenseGroup, PackedGroup, takes_packed
from repro.rollout.gpu.graphs import CapturedSteps, Captures
from repro.rollout.gpu.kernel_ops import kernel_operations
from repro.rollout.linears import ModuleGroup, ProjectionGroup
from repro.rollout.state import RowState
from repro.spec.arm import require


class GpuBackend:
    """Kernels, fused projections, captured steps.

    Attributes
    ----------
    live_noise
        True: noise is read from buffers, so captured steps see it.
    """

    live_noise = True

    def __init__(self, policy: Policy, config: EngineConfig) -> None:
        require(
            policy.compute_dtype == torch.bfloat16,
            f"compute_dtype is {policy.compute_dtype}; the engine's kernels need bfloat16",
        )
        decoder: Any = policy.decoder
        device = policy.device
        self._config = config
        self.cache_dtype = cache_dtype(policy, config)
        heads = (
            decoder.config.num_attention_heads,
            decoder.config.num_key_value_heads,
            decoder.model.layers[0].self_attn.head_dim,
        )
        overlap = torch.cuda.get_device_capability(device)[0] >= 9
        self.beside = _stream_beside(device)
        self.operations = kernel_operations(config.slots, heads, device, overlap=overlap)
        self._captures = Captures(device)

    def group(self, modules: Sequence[nn.Module]) -> ProjectionGroup:
        """Return one product for projections that share an input, where kernels serve."""
        if self._config.products == "bitsandbytes":
            return BitsandbytesGroup(modules)
        if all(isinstance(base_linear(module), nn.Linear) for module in modules):
            return DenseGroup(modules)
        if takes_packed(modules):
            return PackedGroup(modules, overlap=self.operations.overlap, beside=self.beside)
        return ModuleGroup(modules)

    def steps(self, forward: Forward, state: RowState) -> Steps:
        """Return captured steps."""
        return CapturedSteps(forward, state, self._captures)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of captured branches: each stream has its own workspace.

    Of high priority, so that its few blocks are not left to the end of a large product's.
    """
    return torch.cuda.Stream(device, priority=-1)
