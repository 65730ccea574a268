"""The next-token loss of a policy in pre-training: by transformers' forward pass, or a lean one.

`mean_loss` is the tiny policy's: transformers' own pass in float32.

`weighted_loss` is the proxy policies'. Its pass is the same function of the same parameters (a test
compares the two), with what training does not need left out: no mask, since padding stands on the
right, no cache, q, k, v in one product, gate and up in another, one fused norm. Parameters are
float32 masters, cast to the compute dtype at use; the residual stream is in the compute dtype, the
loss in float32.

    n = norm(h) g;  q, k, v = n [Wq Wk Wv]^T + b;   h = h + attention(q, k, v) Wo^T
    n = norm(h) g;  h = h + (silu(n Wgate^T) * (n Wup^T)) Wdown^T
    logits = norm(h) g E^T

Why it stands beside the pass of ensembles and transformers': the order of its roundings decides the
bits of the proxy policies, whose digests are among the inputs of every blessed record of their
tier, and runs are compared on equal inputs only. Another order gives other policies from the same
seeds, and their records would have to be made again. It was written for speed on a GPU; on a CPU in
float32 it is no faster than transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2.modeling_qwen2 import repeat_kv

from repro.pretrain.batches import Part

_IGNORED = -100


def mean_loss(model: Any, part: Part) -> Tensor:
    """Return the mean next-token loss of documents, (), float32, nats, by transformers' pass."""
    ids = torch.from_numpy(part.ids).long().to(model.device)
    lengths = torch.from_numpy(part.lengths).to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # (B, T - 1, V)
    padding = torch.arange(1, ids.shape[1], device=ids.device) >= lengths[:, None]  # (B, T - 1)
    targets = ids[:, 1:].masked_fill(padding, _IGNORED)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED
    )


def logits_of(model: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return next-token logits, (B, T, V), `dtype`, of right-padded ids, (B, T), int64."""
    inner, config = model.model, model.config
    positions = torch.arange(ids.shape[1], device=ids.device)[None]  # (1, T)
    hidden = functional.embedding(ids, inner.embed_tokens.weight).to(dtype)
    # (1, 1, T, D) each
    cos, sin = (part.to(dtype)[:, None] for part in inner.rotary_emb(hidden, positions))
    for layer in inner.layers:
        normed = _norm(hidden, layer.input_layernorm, config)
        hidden = hidden + _attention(layer.self_attn, normed, cos, sin, config)
        normed = _norm(hidden, layer.post_attention_layernorm, config)
        hidden = hidden + _feed_forward(layer.mlp, normed)
    hidden = _norm(hidden, inner.norm, config)
    return functional.linear(hidden, inner.embed_tokens.weight.to(dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alternatives:
    """Next tokens that share the loss of a position with the one that stands there.

    Attributes
    ----------
    ids : Tensor, (B, T - 1), int64
        The other token.
    shares : Tensor, (B, T - 1), float32
        Of the token that stands there; 1 where there is no other.
    """

    ids: Tensor
    shares: Tensor

    def to(self, device: torch.device) -> Alternatives:
        """Return a copy on `device`."""
        return Alternatives(ids=self.ids.to(device), shares=self.shares.to(device))


def weighted_loss(
    model: Any,
    ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    alternatives: Alternatives | None = None,
) -> Tensor:
    """Return the weighted sum of next-token losses, (), float32, nats.

    Parameters
    ----------
    ids
        (B, T), int64.
    weights
        (B, T - 1), float32: of predicting token t + 1.
    alternatives
        None where every position's target is the token that stands there.
    """
    logits = logits_of(model, ids, dtype)[:, :-1].flatten(0, 1).float()  # (B (T - 1), V)
    # By predicted token: (B (T - 1),)
    losses = functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    if alternatives is not None:
        other = functional.cross_entropy(logits, alternatives.ids.flatten(), reduction="none")
        losses = torch.lerp(other, losses, alternatives.shares.flatten())
    return (losses * weights.flatten()).sum()


def _norm(hidden: Tensor, norm: Any, config: Any) -> Tensor:
    gain = norm.weight.to(hidden.dtype)
    return functional.rms_norm(hidden, gain.shape, gain, config.rms_norm_eps)


def _joined(hidden: Tensor, *linears: Any) -> Tensor:
    """Return the outputs of several linear layers on one input, side by side."""
    weight = torch.cat([linear.weight for linear in linears]).to(hidden.dtype)  # (N1 + N2 + ..., H)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases).to(hidden.dtype) if biases else None
    return functional.linear(hidden, weight, bias)


def _attention(attention: Any, normed: Tensor, cos: Tensor, sin: Tensor, config: Any) -> Tensor:
    B, T, _ = normed.shape
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    joined = _joined(normed, attention.q_proj, attention.k_proj, attention.v_proj)
    # (B, heads + 2 shared, T, D)
    joined = joined.view(B, T, heads + 2 * shared, -1).transpose(1, 2)
    queries, keys, values = joined.split((heads, shared, shared), dim=1)
    queries, keys = _rotated(queries, cos, sin), _rotated(keys, cos, sin)
    keys, values = (repeat_kv(part, heads // shared) for part in (keys, values))  # (B, heads, T, D)
    mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    mixed = mixed.transpose(1, 2).reshape(B, T, -1)  # (B, T, heads D)
    return functional.linear(mixed, attention.o_proj.weight.to(normed.dtype))


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # transformers' own slices the halves, whose backward pass fills and adds whole tensors.
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _feed_forward(mlp: Any, normed: Tensor) -> Tensor:
    gate, up = _joined(normed, mlp.gate_proj, mlp.up_proj).chunk(2, dim=-1)  # (B, T, inner) each
    return functional.linear(functional.silu(gate) * up, mlp.down_proj.weight.to(normed.dtype))
