"""What a packed training pass calls between its blocks' parts, in plain PyTorch, differentiable.

The specification of `kernels.triton.projections` and `kernels.triton.packed_attention`: the same
names and signatures, on any device and in any floating type.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference
from kernels.formats import QuantizedWeight
from kernels.packing import PackedWeight
from kernels.segments import Segments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projections:
    """Frozen weights of projections that share an input.

    Attributes
    ----------
    weights
        (N', K) each, rows of all projections one after another; one where they are one matrix.
    bias : Tensor or None, (N,)
    scaling
        Of the adapters.
    dequantize
        (weight, dtype) to its dense (N', K).
    """

    weights: tuple[Tensor | PackedWeight | QuantizedWeight, ...]
    bias: Tensor | None
    scaling: float = 1.0
    dequantize: Callable[[PackedWeight | QuantizedWeight, torch.dtype], Tensor]

    @property
    def rows(self) -> int:
        """N."""
        return sum(weight.shape[0] for weight in self.weights)

    def matrices(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield the columns of y and the dense (N', K) of each weight, one at a time."""
        at = 0
        for weight in self.weights:
            rows = weight.shape[0]
            dense = weight if isinstance(weight, Tensor) else self.dequantize(weight, dtype)
            yield slice(at, at + rows), dense
            del dense
            at += rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """RMSNorm before projections: its eps, and the noise on its gain, (H,) float32."""

    eps: float
    noise: Tensor | None = None


Before = Norm | Literal["swiglu"] | None


def projected(
    x: Tensor,
    projections: Projections,
    a: Tensor | None,
    b: Tensor | None,
    gain: Tensor | None = None,
    before: Before = None,
) -> tuple[Tensor, Tensor]:
    """Return e(x) W^T + bias + scaling * (e(x) A^T) B^T, (M, N), and x."""
    entered = x
    if isinstance(before, Norm) and gain is not None:
        entered = reference.rms_norm(x, gain, before.eps, before.noise).to(x.dtype)
    elif before == "swiglu":
        entered = reference.swiglu(x)
    dense = torch.cat([matrix for _, matrix in projections.matrices(x.dtype)])
    bias = projections.bias
    y = functional.linear(entered, dense.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if a is not None and b is not None:
        y = y + functional.linear(functional.linear(entered, a), b) * projections.scaling
    return y, x


def packed_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, segments: Segments, *, query_heads: int, scale: float
) -> Tensor:
    """Return rotated causal attention inside each row of a packed pass, (M, Hq D).

    By a call for each prompt and its completions: on a CPU, masking what is not seen takes as long
    as computing it.
    """
    D = cos.shape[1]
    q, k, v = qkv.view(len(qkv), -1, D).tensor_split(
        (query_heads, (qkv.shape[1] // D + query_heads) // 2), dim=1
    )
    q, k = reference.rotary(q, k, cos, sin)
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))  # (heads, M, D) each
    row = torch.bucketize(torch.arange(len(qkv), device=qkv.device), segments.ends, right=True)
    parts, order = [], []
    for places, prompt in _prompts(segments, len(qkv)):
        places = places.to(qkv.device)
        visible = (row[places, None] == row[places]) & (places[:, None] >= places)
        visible[prompt:, :prompt] = True
        part = functional.scaled_dot_product_attention(
            q[:, places],
            k[:, places],
            v[:, places],
            attn_mask=visible,
            scale=scale,
            enable_gqa=len(q) != len(k),
        )
        parts.append(part.transpose(0, 1))  # (m, heads, D)
        order.append(places)
    return torch.cat(parts)[torch.cat(order).argsort()].flatten(1)


def _prompts(s: Segments, tokens: int) -> Iterator[tuple[Tensor, int]]:
    """Yield the places of each prompt and its completions, (m,) int64, and the prompt's number.

    The last are those that see no prompt but their own row.
    """
    keys, queries = s.key_ends.tolist(), s.query_ends.tolist()
    for shown, asking in zip(itertools.pairwise(keys), itertools.pairwise(queries), strict=True):
        own = torch.arange(asking[0], asking[1]) + s.begin
        yield torch.cat([torch.arange(*shown), own]), shown[1] - shown[0]
    alone = torch.cat([torch.arange(s.seen, s.begin), torch.arange(s.end, tokens)])
    if len(alone):
        yield alone, 0
