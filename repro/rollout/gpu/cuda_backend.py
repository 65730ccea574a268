"""The engine's backend on a GPU: kernels, fused projections, captured steps.

A step is everything from the embedding to the rows' next tokens, on tensors that stay where they
are. It is captured once per width and way of drawing, and replayed: the host's part becomes one
call. Whatever is needed for the first time is run as it is, which compiles kernels and makes
workspaces (neither may happen under capture), and captured after that for the next time. Captures
share one memory pool.

Easy to get wrong: each stream has its own workspace, so the first run and the capture use the same
stream; and captures that share a pool overwrite one another's intermediate results, so they must be
replayed one after another, on one stream, and leave nothing behind but what they write in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from kernels import dispatch
from kernels.triton import (
    decode_adapter,
    decode_choice,
    decode_step,
    nucleus,
    prefill_attention,
    rotary,
)
from repro.models.lora import base_linear
from repro.models.policy import Policy
from repro.rollout.backend import Backend
from repro.rollout.engine_config import EngineConfig
from repro.rollout.gpu.bitsandbytes_linears import BitsandbytesGroup
from repro.rollout.gpu.fused_linears import DenseGroup, QuantizedGroup, takes_fused
from repro.rollout.linears import ModuleGroup, ProjectionGroup
from repro.spec.checks import require

KERNELS = SimpleNamespace(
    add_norm=decode_step.add_norm,
    attend_step=decode_step.attend_step,
    rotary_write=rotary.rotary_write,
    prefill_attention=prefill_attention.prefill_attention,
    add_adapter=decode_adapter.add_adapter,
    swiglu=decode_step.swiglu,
    adapted_swiglu=decode_adapter.adapted_swiglu,
    keep_nucleus=nucleus.keep_nucleus,
    choose=decode_choice.choose,
)


class Captures:
    """Work captured as CUDA graphs, by key."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Replay what was captured under `key`; if nothing was, do `work` and capture it.

        `work` must do the same whenever it has the same key, on tensors that stay where they are.
        """
        if key in self._graphs:
            self._graphs[key].replay()
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self._graphs[key] = graph

    def clear(self) -> None:
        """Drop all captures and the memory they hold."""
        self._graphs.clear()
        # A pool that lost its last capture takes no new one while anything in it is still held.
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()


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
        self.beside = _stream_beside(device)
        super().__init__(
            KERNELS,
            overlap=dispatch.launches_overlap(device),
            workspace=decode_step.StepWorkspace(config.slots, *heads, device),
            live_noise=True,
            captures=Captures(device),
        )

    def group(self, modules: Sequence[nn.Module]) -> ProjectionGroup:
        """Return one product for projections that share an input, where kernels serve."""
        if self._config.products == "bitsandbytes":
            return BitsandbytesGroup(modules)
        if all(isinstance(base_linear(module), nn.Linear) for module in modules):
            return DenseGroup(modules)
        if takes_fused(modules):
            return QuantizedGroup(modules, overlap=self.overlap, beside=self.beside)
        return ModuleGroup(modules)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of captured branches: each stream has its own workspace.

    Of high priority, so that its few blocks are not left to the end of a large product's.
    """
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which work is captured.

    Kernels and cuBLAS keep one workspace per stream: with a stream of its own, each engine would
    leave one behind.
    """
    return torch.cuda.Stream(device)
