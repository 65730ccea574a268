"""Rows of `kernels.ops.OPS` for a packed training pass (`repro.rl.packed`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch, reference, reference_train
from kernels.op import Arguments, Op, Shape, normal, triton_row
from kernels.segments import Segments, segments

_RANK = 8


def _projected_inputs(
    kind: str, parts: int, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> Arguments:
    """Return x and a number of projections with adapters; biases come with norms, as in Qwen2."""
    M, K, N = shape
    x = normal(M, 2 * K if kind == "swiglu" else K, dtype=dtype, device=device, seed=seed)
    weight, a = (
        (normal(rows, K, dtype=torch.float32, device=device, seed=seed + rows) * K**-0.5).to(dtype)
        for rows in (N, parts * _RANK)
    )
    b = normal(N, parts * _RANK, dtype=dtype, device=device, seed=seed + 2)
    gain, bias = None, None
    before: Any = None if kind == "plain" else kind
    if kind == "norm":
        gain, bias = (normal(n, dtype=dtype, device=device, seed=seed + 3) for n in (K, N))
        noise = normal(K, dtype=torch.float32, device=device, seed=seed + 4) * 0.01
        before = reference_train.Norm(eps=1e-6, noise=noise)
    weights = tuple(part.contiguous() for part in weight.chunk(parts))
    projections = reference_train.Projections(
        weights=weights, bias=bias, scaling=0.5, dequantize=dispatch.dequantize
    )
    return x, projections, a, b, gain, before


def _projected_op(kind: str, parts: int, large: Shape) -> Op:
    return triton_row(
        reference_train.projected,
        "projections",
        name=f"projected_{kind}",
        inputs=partial(_projected_inputs, kind, parts),
        shapes=((5, 64, 48), (33, 100, 84)),
        large=large,
        nbytes=lambda s: 2 * (s[0] * s[1] + s[1] * s[2] + s[0] * s[2]),
        flops=lambda s: 2 * s[0] * s[1] * s[2],
    )


def _attention_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    """Return prompts of about S tokens with two completions each, of 0 to 3 S tokens."""
    prompts, S, query, key, D = shape
    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(1, S + 1, (prompts,), generator=generator)
    rest = torch.randint(0, 3 * S, (prompts, 2), generator=generator)
    rest[:, 1] += 1
    rest[-1] = 0  # one prompt alone
    where = segments(own, rest.flatten(), torch.arange(prompts).repeat_interleave(2), device)
    M = int(own.sum() + rest.sum())
    positions = torch.arange(M) % (4 * S)
    angles = positions.unsqueeze(1) * (1e4 ** (-torch.arange(0, D, 2) / D)).repeat(2)  # (M, D)
    qkv = normal(M, (query + 2 * key) * D, dtype=dtype, device=device, seed=seed + 1)
    cos, sin = (part.to(device, dtype) for part in (angles.cos(), angles.sin()))
    return qkv, cos, sin, where, query, D**-0.5


def _attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, where: Segments, *, query_heads: int, scale: float
) -> Tensor:
    """Do as the reference, and rotate queries and keys in place as the kernel does."""
    out = reference_train.packed_attention(
        qkv, cos, sin, where, query_heads=query_heads, scale=scale
    )
    heads = qkv.view(len(qkv), -1, cos.shape[1])
    turned = heads[:, : (query_heads + heads.shape[1]) // 2]
    turned.copy_(reference.rotary(turned, turned, cos, sin)[0])
    return out


TRAIN_OPS: tuple[Op, ...] = (
    _projected_op("plain", 1, (8192, 3584, 3584)),
    _projected_op("norm", 3, (8192, 3584, 4608)),
    _projected_op("swiglu", 1, (8192, 18944, 3584)),
    Op(
        name="packed_attention",
        reference=_attention,
        kernel="kernels.triton.packed_attention:packed_attention",
        inputs=_attention_inputs,
        shapes=((4, 9, 4, 2, 32), (3, 40, 7, 1, 64)),
        large=(4, 256, 28, 4, 128),
        # qkv read and rotated in place, the output written: 3.5 S tokens of a prompt and its rows.
        nbytes=lambda s: 14 * s[0] * s[1] * s[4] * (s[2] + s[3]),
        flops=lambda s: 16 * s[0] * s[1] * s[1] * s[2] * s[4],
        named=("query_heads", "scale"),
        written=(0,),
        interpretable=False,
    ),
)
