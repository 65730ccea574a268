"""The policy as plain tensors, for a decoder that needs no autograd and no module tree.

The stacked pass (`repro.rl.stacked`) reads everything from `DecoderWeights`: dense matrices with
the adapter merged into them, biases, head norms, and the live norm modules, whose noise it must
take as it finds it. One structure serves Qwen2 (biases on q, k, v), Qwen3 (norms on the heads of q
and k, an explicit head size) and Llama (neither): what a model lacks is None.

The block of layer l, on the residual stream h (B, T, H):

    n = input_norm(h);   q, k, v = n Wq^T + bq, ...;   q, k = head norms, then rotary
    h = h + softmax(scaling * q k^T + causal mask) v Wo^T + bo
    n = post_norm(h);    h = h + (act(n Wgate^T) * (n Wup^T)) Wdown^T

Easy mistakes
-------------
* The tensors are a snapshot: after an optimiser step, take them again. Norms are the modules
  themselves, so noise and trained gains are always current.
* The head norm of Qwen3 comes after the reshape to heads and before the rotary embedding.
* Rotary angles come from transformers' own module, whatever scaling the config asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from repro.models.lora import base_linear, effective_weight
from repro.models.norms import PerturbableRMSNorm, block_norms, final_norm

if TYPE_CHECKING:
    from repro.models.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """A dense matrix (N, K) with its adapter merged, and its bias, (N,) or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One block: its live norm modules, to be called, and its seven projections.

    `q_norm` and `k_norm`, (head_dim,), are the gains of Qwen3's head norms, None elsewhere.
    """

    input_norm: PerturbableRMSNorm
    post_norm: PerturbableRMSNorm
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    gate: Projection
    up: Projection
    down: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderWeights:
    """A whole decoder.

    Attributes
    ----------
    embedding, lm_head : Tensor, (V, H)
        The same tensor when tied.
    rotary
        `rotary(hidden, position_ids (B, T))` returns cos and sin, (B, T, head_dim).
    query_heads, key_heads
        Query head j reads key head j // (query_heads // key_heads).
    scaling
        Factor on the attention scores.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: PerturbableRMSNorm
    lm_head: Tensor
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    activation: Callable[[Tensor], Tensor]
    query_heads: int
    key_heads: int
    head_dim: int
    scaling: float
    head_norm_eps: float


@torch.no_grad()
def policy_weights(policy: Policy, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    """Return the policy's weights as they are now, in `dtype`, adapters merged in float32."""
    decoder: Any = policy.decoder
    config = decoder.config
    norms = block_norms(decoder)
    layers = []
    for number, block in enumerate(decoder.model.layers):
        attention, mlp = block.self_attn, block.mlp
        prefix = f"model.layers.{number}"
        layers.append(
            LayerWeights(
                input_norm=norms[f"{prefix}.input_layernorm"],
                post_norm=norms[f"{prefix}.post_attention_layernorm"],
                q=_projection(attention.q_proj, dtype),
                k=_projection(attention.k_proj, dtype),
                v=_projection(attention.v_proj, dtype),
                o=_projection(attention.o_proj, dtype),
                gate=_projection(mlp.gate_proj, dtype),
                up=_projection(mlp.up_proj, dtype),
                down=_projection(mlp.down_proj, dtype),
                q_norm=_gain(getattr(attention, "q_norm", None), dtype),
                k_norm=_gain(getattr(attention, "k_norm", None), dtype),
            )
        )
    first = decoder.model.layers[0]
    embedding = decoder.model.embed_tokens.weight.detach().to(dtype)
    tied = decoder.lm_head.weight is decoder.model.embed_tokens.weight
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=final_norm(decoder),
        lm_head=embedding if tied else decoder.lm_head.weight.detach().to(dtype),
        rotary=decoder.model.rotary_emb,
        activation=first.mlp.act_fn,
        query_heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_dim=first.self_attn.head_dim,
        scaling=first.self_attn.scaling,
        head_norm_eps=config.rms_norm_eps,
    )


def _projection(linear: nn.Module, dtype: torch.dtype) -> Projection:
    bias = base_linear(linear).bias
    return Projection(
        weight=effective_weight(linear, dtype),
        bias=None if bias is None else bias.detach().to(dtype),
    )


def _gain(norm: nn.Module | None, dtype: torch.dtype) -> Tensor | None:
    return None if norm is None else norm.get_parameter("weight").detach().to(dtype)
