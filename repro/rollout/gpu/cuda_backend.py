"""The engine's backend on a GPU: kernels, fused projections, captured steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kernels import dispatch
from kernels.triton import decode_adapter, decode_choice, decode_step, prefill_attention, rotary
from repro.models.lora import base_linear
from repro.models.policy import Policy
from repro.rollout.backend import Backend
from repro.rollout.engine_config import EngineConfig
from repro.rollout.engine_ops import Operations, Primitives
from repro.rollout.forward import Forward
from repro.rollout.gpu.bitsandbytes_linears import BitsandbytesGroup
from repro.rollout.gpu.fused_linears import DenseGroup, QuantizedGroup, takes_fused
from repro.rollout.gpu.graphs import CapturedSteps, Captures
from repro.rollout.linears import ModuleGroup, ProjectionGroup
from repro.rollout.state import RowState
from repro.spec.checks import require

KERNELS = Primitives(
    add_norm=decode_step.add_norm,
    attend_step=decode_step.attend_step,
    rotary_write=rotary.rotary_write,
    prefill_attention=prefill_attention.prefill_attention,
    add_adapter=decode_adapter.add_adapter,
    swiglu=decode_step.swiglu,
    adapted_swiglu=decode_adapter.adapted_swiglu,
    choose=decode_choice.choose,
)


def kernel_operations(
    slots: int, heads: tuple[int, int, int], device: torch.device, *, overlap: bool
) -> Operations:
    """Return the operations by kernels, for steps of at most `slots` rows.

    `heads` are query heads, key heads and head dimension; `overlap` uses programmatic dependent
    launch (Hopper and newer).
    """
    workspace = decode_step.StepWorkspace(slots, *heads, device)
    return Operations(KERNELS, overlap=overlap, workspace=workspace)


class GpuBackend(Backend):
    """Kernels, fused projections, captured steps."""

    def __init__(self, policy: Policy, config: EngineConfig) -> None:
        require(
            policy.compute_dtype == torch.bfloat16,
            f"compute_dtype is {policy.compute_dtype}; the engine's kernels need bfloat16",
        )
        decoder: Any = policy.decoder
        device = policy.device
        self._config = config
        heads = (
            decoder.config.num_attention_heads,
            decoder.config.num_key_value_heads,
            decoder.model.layers[0].self_attn.head_dim,
        )
        overlap = dispatch.launches_overlap(device)
        self.beside = _stream_beside(device)
        operations = kernel_operations(config.slots, heads, device, overlap=overlap)
        super().__init__(policy.compute_dtype, operations, live_noise=True)
        self._captures = Captures(device)

    def group(self, modules: Sequence[nn.Module]) -> ProjectionGroup:
        """Return one product for projections that share an input, where kernels serve."""
        if self._config.products == "bitsandbytes":
            return BitsandbytesGroup(modules)
        if all(isinstance(base_linear(module), nn.Linear) for module in modules):
            return DenseGroup(modules)
        if takes_fused(modules):
            return QuantizedGroup(modules, overlap=self.operations.overlap, beside=self.beside)
        return ModuleGroup(modules)

    def steps(self, forward: Forward, state: RowState) -> CapturedSteps:
        """Return captured steps."""
        return CapturedSteps(forward, state, self._captures)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of captured branches: each stream has its own workspace.

    Of high priority, so that its few blocks are not left to the end of a large product's.
    """
    return torch.cuda.Stream(device, priority=-1)
