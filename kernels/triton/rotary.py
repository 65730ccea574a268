"""Rotary embedding and the write into the paged key-value cache, in one launch, in Triton.

A program rotates one head of one row in float32, in transformers' half-split layout, and rounds
once. A row of the fused projection's output has Hq query heads, then Hkv key heads, then Hkv value
heads, D elements each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_step import Heads, LayerCache, Rotation
from kernels.triton import FUSED


@triton.jit
def _rotary_kernel(
    qkv, cos, sin, positions, slots, q_out, key_cache, value_cache, qkv_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, D // 2)
    # Load one head of one row, in halves, (D / 2,) each.
    source = qkv + row * qkv_stride + head * D
    low = tl.load(source + half).to(tl.float32)
    high = tl.load(source + D // 2 + half).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    if head >= HQ + HKV:
        # A value goes into the cache as it is.
        if slot >= 0:
            target = value_cache + (slot * HKV + head - HQ - HKV) * D
            tl.store(target + half, low.to(value_cache.dtype.element_ty))
            tl.store(target + D // 2 + half, high.to(value_cache.dtype.element_ty))
    else:
        # Rotate a query or a key in float32, by the angles of the row's position.
        at = tl.load(positions + row).to(tl.int64) * D
        cos_low = tl.load(cos + at + half).to(tl.float32)
        cos_high = tl.load(cos + at + D // 2 + half).to(tl.float32)
        sin_low = tl.load(sin + at + half).to(tl.float32)
        sin_high = tl.load(sin + at + D // 2 + half).to(tl.float32)
        new_low = low * cos_low - high * sin_low
        new_high = high * cos_high + low * sin_high
        # Store, rounded once: a query to the output, a key into the cache.
        if head < HQ:
            target = q_out + (row * HQ + head) * D
            tl.store(target + half, new_low.to(q_out.dtype.element_ty))
            tl.store(target + D // 2 + half, new_high.to(q_out.dtype.element_ty))
        elif slot >= 0:
            target = key_cache + (slot * HKV + head - HQ) * D
            tl.store(target + half, new_low.to(key_cache.dtype.element_ty))
            tl.store(target + D // 2 + half, new_high.to(key_cache.dtype.element_ty))


def rotary_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: LayerCache,
    heads: Heads,
    rotation: Rotation,
) -> Tensor:
    """Rotate queries and keys and write keys and values into the cache, in place.

    As `kernels.reference_step.rotary_write`. Rows of `qkv` may be strided, caches are contiguous,
    positions lie within `rotation`, and any negative slot writes nothing. Other widths raise.
    """
    (key_heads, D), query_heads = cache.keys.shape[2:], heads.query
    width = (query_heads + 2 * key_heads) * D
    if qkv.shape[-1] != width or qkv.dim() != 2 or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; {query_heads} query and {key_heads} key heads of "
            f"{D} need (B, {width}) with contiguous rows"
        )
    if not (cache.keys.is_contiguous() and cache.values.is_contiguous()):
        raise ValueError("the cache's keys and values must be contiguous")
    if D & (D - 1):
        raise ValueError(f"the head dimension is {D}; the kernel needs a power of two")
    B = qkv.shape[0]
    q = torch.empty(B, query_heads, D, dtype=qkv.dtype, device=qkv.device)
    if B:
        tensors = (qkv, rotation.cos, rotation.sin, positions, slots, q, cache.keys, cache.values)
        _rotary_kernel[(B, query_heads + 2 * key_heads)](
            *tensors, qkv.stride(0), query_heads, key_heads, D, num_warps=1, **FUSED
        )
    return q
