"""The operations of `ops.TorchOps` on a GPU, by this project's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import decode_adapter, decode_choice, decode_step, prefill_attention, rotary
from repro.rollout.choose import choose
from repro.rollout.linears import Product
from repro.rollout.ops import TILE, Heads, LayerCache, NewTokens, Rotation, norm_heads
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig


class KernelOps:
    """The operations by kernels, each of which can be captured.

    Parameters
    ----------
    slots
        Most rows of a step.
    heads
        (query heads, key heads, head dimension).
    overlap
        Use programmatic dependent launch (Hopper and newer).
    """

    def __init__(
        self, slots: int, heads: tuple[int, int, int], device: torch.device, *, overlap: bool
    ) -> None:
        self.overlap = overlap
        self.workspace = decode_step.StepWorkspace(slots, *heads, device)

    def norm(
        self,
        residual: Tensor,
        update: Tensor | None,
        gain: Tensor,
        noise: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """See `TorchOps.norm`."""
        return decode_step.add_norm(residual, update, gain, noise, eps, overlap=self.overlap)

    def attend_step(
        self,
        qkv: Tensor,
        positions: Tensor,
        table: Tensor,
        cache: LayerCache,
        heads: Heads,
        rotation: Rotation,
    ) -> Tensor:
        """See `TorchOps.attend_step`."""
        return decode_step.attend_step(
            qkv,
            rotation.cos,
            rotation.sin,
            positions,
            table,
            cache.keys,
            cache.values,
            self.workspace,
            query_heads=heads.query,
            scale=heads.scaling,
            q_gain=heads.q_gain,
            k_gain=heads.k_gain,
            eps=heads.eps,
            overlap=self.overlap,
        )

    def place(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: LayerCache,
        heads: Heads,
        rotation: Rotation,
    ) -> Tensor:
        """See `TorchOps.place`."""
        return rotary.rotary_write(
            norm_heads(qkv, heads),
            rotation.cos,
            rotation.sin,
            positions,
            slots,
            cache.keys,
            cache.values,
            query_heads=heads.query,
        )

    def attend_new(
        self, queries: Tensor, new: NewTokens, cache: LayerCache, heads: Heads
    ) -> Tensor:
        """See `TorchOps.attend_new`."""
        return prefill_attention.prefill_attention(
            queries, cache.keys, cache.values, new.table, new.tiles, heads.scaling, tile=TILE
        )

    def whole(self, product: Product) -> Tensor:
        """See `TorchOps.whole`."""
        if product.z is None or product.b is None:
            return product.base
        return decode_adapter.add_adapter(
            product.base,
            product.z,
            product.b,
            product.ends,
            product.scaling,
            overlap=self.overlap and not product.joined,
        )

    def swiglu(self, gate_up: Product) -> Tensor:
        """See `TorchOps.swiglu`."""
        if gate_up.z is None or gate_up.b is None:
            return decode_step.swiglu(gate_up.base, overlap=self.overlap)
        return decode_adapter.adapted_swiglu(
            gate_up.base,
            gate_up.z,
            gate_up.b,
            gate_up.scaling,
            overlap=self.overlap and not gate_up.joined,
        )

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """Return (M, V) float32 logits, accumulated and kept in float32."""
        if hidden.dtype == torch.float32 or hidden.device.type != "cuda":
            return torch.nn.functional.linear(hidden, lm_head).float()
        return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32)

    def choose(self, logits: Tensor, state: RowState, sampling: SamplingConfig) -> None:
        """See `TorchOps.choose`."""
        if sampling.filtered:
            choose(logits, state, sampling)
            return
        decode_choice.choose(
            logits,
            temperature=state.temperature,
            greedy=sampling.temperature == 0,
            tokens=state.tokens,
            positions=state.positions,
            counts=state.counts,
            limits=state.limits,
            status=state.status,
            uniforms=state.uniforms,
            out_tokens=state.out_tokens,
            out_logprobs=state.out_logprobs,
            ends=state.ends,
            overlap=self.overlap,
        )
