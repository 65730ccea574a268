"""The policy as dense float32 tensors, for a decoder that needs no autograd and no module tree.

Adapters are merged into their matrices, and projections that read the same input are one matrix
(q, k, v; gate, up). One structure serves Qwen2 (biases on q, k, v), Qwen3 (norms on the heads of q
and k, an explicit head size) and Llama (neither): what a model lacks is None.

The block of layer l, on the residual stream h (M, H):

    n = input_norm(h);   q, k, v = n Wqkv^T + b;   q, k = head norms, then rotary
    h = h + softmax(scaling * q k^T + causal mask) v Wo^T
    n = post_norm(h);    h = h + (silu(n Wgate^T) * (n Wup^T)) Wdown^T

Easy mistakes
-------------
* The matrices are a snapshot: after an optimiser step, take them again. Norms are the modules
  themselves, so noise is always current.
* The head norm of Qwen3 comes after the reshape to heads and before the rotary embedding.
* Rotary angles come from transformers' own module, whatever scaling the config asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from repro.models.decoder import LINEARS
from repro.models.fused_weights import fused_bias
from repro.models.lora import base_linear, effective_weight
from repro.models.norms import PerturbableRMSNorm, final_norm

if TYPE_CHECKING:
    from repro.models.policy import Policy


# Returns (M, N) of x (M, K), by a dense matrix with its adapter merged, and its bias.
Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One block: its live norm modules and its fused projections.

    `head_gain` is that of Qwen3's norms on the heads of q and k, (heads, head_dim), None elsewhere.
    """

    input_norm: PerturbableRMSNorm
    post_norm: PerturbableRMSNorm
    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection
    head_gain: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyWeights:
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
    epsilon
        Added to the norms' mean square.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: PerturbableRMSNorm
    lm_head: Tensor
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    query_heads: int
    key_heads: int
    head_dim: int
    scaling: float
    epsilon: float

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.query_heads // self.key_heads


@torch.no_grad()
def policy_weights(policy: Policy) -> PolicyWeights:
    """Return the policy's weights as they are now, adapters merged."""
    decoder: Any = policy.decoder
    config, first = decoder.config, decoder.model.layers[0]
    embedding = decoder.model.embed_tokens.weight.detach().float()
    tied = decoder.lm_head.weight is decoder.model.embed_tokens.weight
    return PolicyWeights(
        embedding=embedding,
        layers=tuple(_layer(block, config) for block in decoder.model.layers),
        final_norm=final_norm(decoder),
        lm_head=embedding if tied else decoder.lm_head.weight.detach().float(),
        rotary=decoder.model.rotary_emb,
        query_heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_dim=first.self_attn.head_dim,
        scaling=first.self_attn.scaling,
        epsilon=config.rms_norm_eps,
    )


def _layer(block: Any, config: Any) -> LayerWeights:
    attention = block.self_attn
    head_gain = None
    if hasattr(attention, "q_norm"):
        gains = (
            attention.q_norm.weight.expand(config.num_attention_heads, -1),
            attention.k_norm.weight.expand(config.num_key_value_heads, -1),
        )
        head_gain = torch.cat(gains).float()
    parts = {name: _fused(block, leaves) for name, leaves in LINEARS.items()}
    return LayerWeights(
        input_norm=block.input_layernorm,
        post_norm=block.post_attention_layernorm,
        head_gain=head_gain,
        **parts,
    )


def _fused(block: Any, leaves: tuple[str, ...]) -> Projection:
    """Return projections that read the same input as one."""
    modules = dict(block.self_attn.named_children()) | dict(block.mlp.named_children())
    linears = [modules[leaf] for leaf in leaves]
    bias = fused_bias([base_linear(linear).bias for linear in linears])
    return partial(
        functional.linear,
        weight=torch.cat([effective_weight(linear) for linear in linears]),
        bias=None if bias is None else bias.float(),
    )
