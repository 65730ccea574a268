"""Dequantise from the checkpoint's layout, in Triton, on any GPU: the portable path.

    value = codebook[code] * scale      in float32, rounded once

with scale = E4M3 / encode scale (NVFP4, a correctly rounded division), 2**(e - 127) (MXFP4) or
absmax (NF4). One program takes a run of packed bytes of a row, writes both values of each byte.
`kernels.reference.dequantize` is the specification, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats import FORMATS, QuantizedWeight, codebook
from kernels.triton import FUSED

_BYTES = 1024


@triton.jit
def _dequantize_kernel(
    codes, scales, encode, codebook, out, total,
    BLOCK_BYTES: tl.constexpr, KIND: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    valid = at < total
    # Load bytes of two codes and the scale of each byte's block, (BYTES,) each.
    pair = tl.load(codes + at, mask=valid, other=0).to(tl.int32)
    raw = tl.load(scales + at // BLOCK_BYTES, mask=valid, other=0)
    # Decode the scales.
    if KIND == 0:
        # E4M3 by its bits: the interpreter has no such type.
        byte = raw.to(tl.int32)
        exponent = (byte >> 3) & 15
        mantissa = (byte & 7).to(tl.float32)
        normal = ((exponent + 120) << 23).to(tl.float32, bitcast=True) * (1.0 + mantissa * 0.125)
        scale = tl.where(exponent == 0, mantissa * 0.001953125, normal)
        scale = tl.div_rn(scale, tl.load(encode))
    elif KIND == 1:
        byte = raw.to(tl.int32)
        bits = tl.where(byte == 0, 1 << 22, byte << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = raw.to(tl.float32)
    # Decode the codes; the low half of a byte is the even element.
    low = tl.load(codebook + (pair & 15)) * scale
    high = tl.load(codebook + (pair >> 4)) * scale
    # Store pairs side by side, (BYTES, 2).
    both = tl.join(low, high)
    target = out + at[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(target, both.to(out.dtype.element_ty), mask=valid[:, None])


def dequantize(
    weight: QuantizedWeight, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """Return the dense matrix, (N, K), in a floating type: that of `out` where it is given.

    `kernels.reference.dequantize` is the specification. `out` is contiguous.
    """
    N, K = weight.shape
    kind = FORMATS[weight.format].number
    scales = weight.block_scales if kind == 2 else weight.block_scales.view(torch.uint8)
    if out is None:
        out = torch.empty(N, K, dtype=dtype, device=weight.device)
    elif out.shape != (N, K) or not out.is_contiguous():
        raise ValueError(f"out has shape {tuple(out.shape)}; it must be ({N}, {K}), contiguous")
    total = N * K // 2
    stored = (weight.codes.contiguous(), scales.contiguous(), weight.encode_scale)
    table = codebook(weight.format, weight.device)
    _dequantize_kernel[(triton.cdiv(total, _BYTES),)](
        *stored, table, out, total, weight.block // 2, kind, _BYTES, num_warps=4, **FUSED
    )
    return out
