"""Weight-only linear layer for few rows from the checkpoint's layout, in Triton: portable.

For up to 16 rows of x the time goes into reading W, so codes are expanded in registers and
multiplied there. One program takes BLOCK_N rows of W and a range of columns; even and odd elements
of a byte are two products with the even and the odd columns of x, so nothing is interleaved:

    y = x_even w_low^T + x_odd w_high^T

E2M1 codes become bfloat16 by moving their bits (value * 2**-126) and one multiplication; the block
scale multiplies in float32 on the way. Ranges of columns leave partial sums that torch adds up in a
fixed order. More rows go through `kernels.dequantize` and torch's product, which the dispatcher
chooses.

Easy to get wrong: K is a `constexpr`, or the compiler cannot prove that the loads are aligned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dequantize import _codebook
from kernels.formats import QuantizedWeight
from kernels.reference_quantize import decoded_block_scales

_WANTED_PROGRAMS = 528


@triton.jit
def _linear_kernel(
    x, codes, scales, encode, codebook, partial, M, N, x_stride, K: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BYTES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    held_n = n < N
    m = tl.arange(0, ROWS)
    held_m = m < M
    steps: tl.constexpr = (K // 2 + BYTES - 1) // BYTES
    per_split: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    factor = 1.0
    if KIND == 0:
        factor = 1.0 / tl.load(encode)
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    row = n.to(tl.int64)[:, None]
    for i in range(per_split):
        at = (split * per_split + i) * BYTES + tl.arange(0, BYTES)
        held = at < K // 2
        mask = held_n[:, None] & held[None, :]
        pair = tl.load(codes + row * (K // 2) + at[None, :], mask=mask, other=0).to(tl.int32)
        scale_at = row * (K // BLOCK) + (at * 2 // BLOCK)[None, :]
        raw = tl.load(scales + scale_at, mask=mask, other=0)
        if KIND == 0:
            byte = raw.to(tl.int32)
            exponent = (byte >> 3) & 15
            mantissa = (byte & 7).to(tl.float32)
            bits = ((exponent + 120) << 23) | ((byte & 7) << 20)
            scale = tl.where(
                exponent == 0, mantissa * 0.001953125, bits.to(tl.float32, bitcast=True)
            )
        elif KIND == 1:
            byte = raw.to(tl.int32)
            scale = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
        else:
            scale = raw.to(tl.float32)
        if KIND == 2:
            low = tl.load(codebook + (pair & 15)) * scale
            high = tl.load(codebook + (pair >> 4)) * scale
        else:
            # Sign and magnitude as float32 bits are the value times 2^-126.
            low_bits = ((pair & 8) << 28) | ((pair & 7) << 22)
            high_bits = ((pair & 128) << 24) | ((pair & 112) << 18)
            low = low_bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale
            high = high_bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale
        x_at = x + m[None, :] * x_stride + (at * 2)[:, None]
        x_mask = held_m[None, :] & held[:, None]
        x_even = tl.load(x_at, mask=x_mask, other=0.0)
        x_odd = tl.load(x_at + 1, mask=x_mask, other=0.0)
        if WIDEN:
            acc += tl.dot(low, x_even.to(tl.float32)) + tl.dot(high, x_odd.to(tl.float32))
        else:
            acc = tl.dot(low.to(x_even.dtype), x_even, acc)
            acc = tl.dot(high.to(x_odd.dtype), x_odd, acc)
    target = partial + (split * M + m[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(target, acc * factor, mask=held_n[:, None] & held_m[None, :])


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply at most 16 rows by a quantised weight, without gradients.

    Parameters
    ----------
    x : Tensor, (..., K), bfloat16 or float16 (float32 in the interpreter)
    weight
        (N, K), any format, in the checkpoint's layout.
    bias : Tensor or None, (N,)

    Returns
    -------
    Tensor, (..., N), the type of x

    Raises
    ------
    ValueError
        When there are more rows, or K does not fit.
    """
    N, K = weight.shape
    flat = x.reshape(-1, x.shape[-1])
    M = flat.shape[0]
    if flat.shape[1] != K or M > 16:
        raise ValueError(f"x has {M} rows of {flat.shape[1]}; at most 16 rows of {K} are needed")
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    kind = {"nvfp4": 0, "mxfp4": 1, "nf4": 2}[weight.format]
    scales = weight.block_scales
    scales = decoded_block_scales(weight) if kind == 2 else scales.view(torch.uint8)
    block_n, bytes_ = 32, 128
    row_blocks = triton.cdiv(N, block_n)
    splits = max(1, min(16, _WANTED_PROGRAMS // row_blocks, K // 2 // bytes_))
    partial = torch.empty(splits, M, N, dtype=torch.float32, device=x.device)
    widen = x.device.type == "cpu" or x.dtype == torch.float32
    if M:
        _linear_kernel[(row_blocks, splits)](
            flat, weight.codes, scales, weight.encode_scale, _codebook(weight.format, x.device),
            partial, M, N, flat.stride(0), K, weight.block, kind, splits, 16, block_n, bytes_,
            widen, num_warps=4, num_stages=2,
        )  # fmt: skip
    y = partial[0] if splits == 1 else partial.sum(0)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], N)
