"""The block of S runs on a flat axis of tokens, and attention over it.

Tokens of a run lie on one axis M, whatever sequences they belong to: norms and products do not
care. Only attention does, and takes its part of M as (sequences, tokens).

Easy to get wrong: query heads that read one key head stand as further rows of one attention call,
token by token (row t * group + j), so a mask over tokens is repeated in that order; a padded query
that sees nothing gives NaN, so the diagonal is always visible.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import dispatch
from repro.rl.stacked.shape import Shape
from repro.rl.stacked.stack import Layer, Weights

# cuDNN's attention, which torch would take first, makes a plan of 0.1 s for every new length.
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Fused attention on a GPU wants rows of masks at multiples of 16 bytes.
ALIGNED = 8


def aligned(size: int) -> int:
    """Return `size` rounded up to a multiple of what attention masks are aligned to."""
    return -(-size // ALIGNED) * ALIGNED


def embed(weights: Weights, token_ids: Tensor, stream: torch.dtype) -> Tensor:
    """Return (S, M, H) of token ids (S, M)."""
    table = weights.embedding
    if table.shape[0] == 1:
        return functional.embedding(token_ids, table[0]).to(stream)
    # (S, 1): where each run's rows begin in the tables laid end to end, (S V, H)
    offset = torch.arange(table.shape[0], device=table.device).unsqueeze(1) * table.shape[1]
    return functional.embedding(token_ids + offset, table.flatten(0, 1)).to(stream)


def norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Return RMSNorm of x (S, M, H) with gains (S, 1, H) float32, in x's dtype; over heads, too.

    As `kernels.reference.rms_norm` with noise: rounded to x's dtype before the gain.
    """
    normed = functional.rms_norm(x, (x.shape[-1],), eps=epsilon)
    return (normed * gain).to(x.dtype)


def project(
    layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys and values, (S, M, heads, head_dim).

    cos and sin are (S, M, 1, head_dim) float32, sin with the rotation's minus sign in its first
    half.
    """
    S, M, _ = hidden.shape
    qkv = layer.qkv(norm(hidden, layer.input_gain, shape.epsilon))
    qkv = qkv.view(S, M, -1, shape.head_dim)  # (S, M, query + 2 key heads, D)
    turning, values = qkv.split([shape.query_heads + shape.key_heads, shape.key_heads], dim=2)
    if layer.head_gain is not None:
        turning = norm(turning, layer.head_gain, shape.epsilon)
    first, second = turning.chunk(2, dim=-1)
    swapped = torch.cat([second, first], dim=-1)
    turned = torch.addcmul(turning * cos, swapped, sin).to(qkv.dtype)
    queries, keys = turned.split([shape.query_heads, shape.key_heads], dim=2)
    return queries, keys, values


def finish(layer: Layer, hidden: Tensor, attended: Tensor, shape: Shape) -> Tensor:
    """Return the residual stream after a block, given attention's output (S, M, queries)."""
    hidden = hidden + layer.o(attended)
    both = layer.gate_up(norm(hidden, layer.post_gain, shape.epsilon))
    return hidden + layer.down(dispatch.swiglu(both))


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    """Return attention's output (N, T, queries) of N sequences.

    Parameters
    ----------
    queries : Tensor, (N, T, query_heads, head_dim)
    keys, values : Tensor, (N, key_heads, C, head_dim)
    mask : Tensor, (N, 1, T * group, C)
        Added to the scores; rows as the module docstring says. T * group may be 1, for all rows.
    """
    N, T = queries.shape[:2]
    if T == 1:
        # (N, key heads, group, D): views alone
        rows = queries.view(N, shape.key_heads, shape.group, shape.head_dim)
        out = functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, scale=shape.scaling
        )
        return out.reshape(N, 1, shape.queries)
    # (N, T, key heads, group, D)
    rows = queries.view(N, T, shape.key_heads, shape.group, shape.head_dim)
    # (N, key heads, T * group, D), token by token
    rows = rows.transpose(1, 2).reshape(N, shape.key_heads, T * shape.group, shape.head_dim)
    with sdpa_kernel(_WITHOUT_PLANS):
        out = functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, scale=shape.scaling
        )
    # (N, T, key heads, group, D)
    out = out.view(N, shape.key_heads, T, shape.group, shape.head_dim).transpose(1, 2)
    return out.reshape(N, T, shape.queries)


def additive(visible: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return (N, 1, T * group, C): 0 where `visible` (N, T, C) is True, -inf elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(~visible, -torch.inf)
    return mask.repeat_interleave(group, dim=1).unsqueeze(1)  # (N, 1, T * group, C)


class Rotary:
    """Tables of the rotary embedding for positions 0 to `positions` - 1, (positions, head_dim)."""

    def __init__(self, rotary: object, positions: int, device: torch.device) -> None:
        places = torch.arange(positions, device=device).unsqueeze(0)  # (1, positions)
        # (1, positions, D) each
        cos, sin = rotary(torch.zeros(1, 1, 1, device=device), places)  # type: ignore[operator]
        half = cos.shape[-1] // 2
        self.cos = cos[0].float()
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).float()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (..., 1, head_dim), of positions (...)."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)  # (..., 1, D)


def prompt_masks(
    padding: Tensor, width: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return positions and the mask of prompts padded on the left.

    Parameters
    ----------
    padding : Tensor, (N,), int64
        Columns on the left that hold nothing.

    Returns
    -------
    positions : Tensor, (N, width), int64
    mask : Tensor, (N, 1, width * group, width)
    """
    columns = torch.arange(width, device=padding.device)
    filled = columns >= padding.unsqueeze(1)  # (N, width)
    causal = columns <= columns.unsqueeze(1)  # (width, width)
    visible = causal & filled.unsqueeze(1)  # (N, width, width)
    visible |= torch.eye(width, dtype=torch.bool, device=padding.device)
    positions = (columns - padding.unsqueeze(1)).clamp_(min=0)  # (N, width)
    return positions, additive(visible, group, dtype)
