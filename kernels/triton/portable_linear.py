"""Weight-only linear layer from the checkpoint's layout, in Triton: portable, for up to 128 rows.

Sixteen codes are one 64-bit load and have one block scale, so a scale is fetched once per block and
never gathered. Two E2M1 codes four places apart land on the sign and the low exponent bits of two
float16 halves by two shifts and masks; that is their value times 2**-14, subnormals included.

    one row      no matrix unit: values are multiplied by x in registers, the sum over a block is
                 scaled once, and the sum over columns is taken once at the end
    up to 128    a tile of W in 16 bits (a product of value and scale, exact) by tl.dot

Where N alone does not fill the device, ranges of columns go to several programs; the last of them
to arrive adds their parts up, always in the same order, so results are the same bits run after run.
More rows, and NF4, go through `kernels.triton.dequantize` and torch's product (`goes_dense`): a
look-up per element costs more in tiles than writing W.

Easy to get wrong: the one-row kernel reads x as (16, K / 16), so that neighbouring lanes, which
hold neighbouring blocks, read neighbouring numbers; K is a `constexpr`, or the compiler cannot
prove that the loads are aligned.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats import FORMATS, QuantizedWeight
from kernels.triton import FUSED
from kernels.triton.dequantize import dequantize

# Rows of x that one launch takes.
MOST_ROWS = 128
# Blocks of rows of W whose columns can be split.
_COUNTERS = 1 << 14


@triton.jit
def _scale(scales, at, mask, KIND: tl.constexpr):
    """Return block scales in float32, of E4M3 or E8M0 by their bits."""
    raw = tl.load(scales + at, mask=mask, other=0)
    if KIND == 0:
        # E4M3's bits as float32's are the scale times 2^-120.
        return (raw.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    # E8M0's byte is float32's exponent; the 2^-127 of byte 0 is subnormal there.
    byte = raw.to(tl.int32)
    return tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def _two(word, PLACE: tl.constexpr):
    """Return the values, times 2^-14, of codes PLACE and PLACE + 4 of a word of eight."""
    magnitude = (word >> 3) if PLACE == 3 else (word << (9 - 4 * PLACE))
    bits = (magnitude & 0x0E000E00) | ((word << (12 - 4 * PLACE)) & -2147450880)
    low = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _finish(
    y, n, m, target, out, bias, arrived, M, N, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Store y, (rows of W, rows of x); the last of several splits adds their parts up in order."""
    # Places in y (M, N) of this tile of y^T, (rows of W, rows of x).
    valid = (n < N)[:, None] & (m < M)[None, :]
    at = m[None, :].to(tl.int64) * N + n[:, None]
    bias_n = tl.zeros((n.shape[0], 1), tl.float32)
    if HAS_BIAS:
        bias_n = tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[:, None]
    if SPLITS == 1:
        tl.store(out + at, y + bias_n, mask=valid)
    else:
        size = tl.full((), 1, tl.int64) * M * N
        tl.store(target + tl.program_id(1) * size + at, y, mask=valid)
        # Parts of the whole program must be written before it says so.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel")
        if before == SPLITS - 1:
            total = bias_n + tl.zeros_like(y)
            for i in tl.static_range(SPLITS):
                total += tl.load(target + i * size + at, mask=valid, other=0, cache_modifier=".cg")
            tl.store(out + at, total, mask=valid)
            tl.store(arrived + tl.program_id(0), 0)


@triton.jit(do_not_specialize=["M"])
def _one_kernel(
    x, codes, scales, encode, bias, target, out, arrived,
    M, N,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, KIND: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One row of x, without the matrix unit."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_n = (n < N)[:, None]
    row = n.to(tl.int64)[:, None]
    steps: tl.constexpr = (GROUPS + BLOCKS - 1) // BLOCKS
    per_split: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    acc = tl.zeros((BLOCK_N, BLOCKS), tl.float32)
    at = tl.program_id(1) * (per_split * BLOCKS) + tl.arange(0, BLOCKS)
    # Load the first codes, (BLOCK_N, BLOCKS): a word of int64 is a group of 16.
    mask = valid_n & (at < GROUPS)[None, :]
    ahead = tl.load(codes + row * GROUPS + at[None, :], mask=mask, other=0)
    for i in range(per_split):
        words = ahead
        valid = at < GROUPS
        mask = valid_n & valid[None, :]
        scale = _scale(scales, row * (GROUPS // SHARE) + (at // SHARE)[None, :], mask, KIND)
        # The next codes are on their way while these are worked on.
        later = at + BLOCKS
        mask = valid_n & ((later < GROUPS) & (i + 1 < per_split))[None, :]
        ahead = tl.load(codes + row * GROUPS + later[None, :], mask=mask, other=0)
        # Decode two codes at a time and multiply; x lies by place in a group, (16, GROUPS).
        part = tl.zeros((BLOCK_N, BLOCKS), tl.float32)
        for half in tl.static_range(2):
            word = (words >> (32 * half)).to(tl.int32)
            for place in tl.static_range(4):
                low, high = _two(word, place)
                column = (half * 8 + place) * GROUPS + at
                part += low * tl.load(x + column, mask=valid, other=0).to(tl.float32)[None, :]
                column += 4 * GROUPS
                part += high * tl.load(x + column, mask=valid, other=0).to(tl.float32)[None, :]
        # Scale each group's sum once.
        acc += part * 16384.0 * scale
        at = later
    # Reduce over the groups, (BLOCK_N, BLOCKS) -> (BLOCK_N, 1).
    factor = 1.0
    if KIND == 0:
        factor = 1.0 / tl.load(encode)
    y = (tl.sum(acc, 1) * factor)[:, None]
    m = tl.arange(0, 1)
    _finish(y, n, m, target, out, bias, arrived, M, N, SPLITS, HAS_BIAS)


@triton.jit
def _eight(word, KIND: tl.constexpr):
    """Return the eight values of a word, in three new dimensions: places 4, 2, 1 of the index."""
    # Decode: a pair has places four apart.
    a0, a4 = _two(word, 0)
    a1, a5 = _two(word, 1)
    a2, a6 = _two(word, 2)
    a3, a7 = _two(word, 3)
    # Join: the bits of the place come out in the order 4, 2, 1.
    values = tl.join(
        tl.join(tl.join(a0, a4), tl.join(a2, a6)), tl.join(tl.join(a1, a5), tl.join(a3, a7))
    )
    # Takes back the values' 2^-14; MXFP4's scales have no room for it.
    if KIND == 1:
        values *= 16384.0
    return values


@triton.jit(do_not_specialize=["M"])
def _tile_kernel(
    x, codes, scales, encode, bias, target, out, arrived,
    M, N, x_stride,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, KIND: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_n = n < N
    row = n.to(tl.int64)[:, None]
    split = tl.program_id(1)
    m = tl.arange(0, ROWS)
    valid_m = m < M
    steps: tl.constexpr = (GROUPS + BLOCKS - 1) // BLOCKS
    per_split: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for i in range(per_split):
        first = (split * per_split + i) * BLOCKS
        at = first + tl.arange(0, BLOCKS)
        mask = valid_n[:, None] & (at < GROUPS)[None, :]
        # Load codes, a group of 16 per word, and scales, (BLOCK_N, BLOCKS) each.
        words = tl.load(codes + row * GROUPS + at[None, :], mask=mask, other=0)
        scale = _scale(scales, row * (GROUPS // SHARE) + (at // SHARE)[None, :], mask, KIND)
        if KIND == 0:
            # Takes back the values' 2^-14; E8M0 scales have no room for it above.
            scale *= 16384.0
        # Load x^T, (BLOCKS * 16, ROWS).
        k = first * 16 + tl.arange(0, BLOCKS * 16)
        x_mask = valid_m[None, :] & (k < GROUPS * 16)[:, None]
        columns = tl.load(x + m.to(tl.int64)[None, :] * x_stride + k[:, None], x_mask, other=0)
        # Decode eight values per half word, (BLOCK_N, BLOCKS, 2, 2, 2) each.
        low = _eight(words.to(tl.int32), KIND)
        high = _eight((words >> 32).to(tl.int32), KIND)
        # (BLOCK_N, BLOCKS, place 4, 2, 1, 8) to (BLOCK_N, BLOCKS, place 8, 4, 2, 1)
        tile = tl.permute(tl.join(low, high), (0, 1, 5, 2, 3, 4))
        tile = tl.reshape(tile, (BLOCK_N, BLOCKS, 16)) * scale[:, :, None]
        tile = tl.reshape(tile, (BLOCK_N, BLOCKS * 16))  # (rows of W, columns)
        # Multiply (BLOCK_N, BLOCKS * 16) by (BLOCKS * 16, ROWS).
        if WIDEN:
            acc += tl.dot(tile, columns.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(tile.to(columns.dtype), columns, acc)
    if KIND == 0:
        acc *= 1.0 / tl.load(encode)
    _finish(acc, n, m, target, out, bias, arrived, M, N, SPLITS, HAS_BIAS)


@lru_cache(maxsize=64)
def _counters(device: int, stream: int) -> Tensor:
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=f"cuda:{device}")


def goes_dense(weight: QuantizedWeight, M: int) -> bool:
    """Tell whether M rows are multiplied by way of a dense W, as tiles would be slower."""
    return M > MOST_ROWS or not FORMATS[weight.format].is_e2m1


def dense_with_columns(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, a: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (x W^T + b, x A^T) from one product: A's rows are below W in the dense buffer.

    As `kernels.cuda.linear.dense_with_columns`, from the checkpoint's layout and in x's type.
    """
    N, K = weight.shape
    scratch = torch.empty(N + len(a), K, dtype=x.dtype, device=x.device)
    dequantize(weight, out=scratch[:N])
    scratch[N:].copy_(a)
    both = torch.nn.functional.linear(x, scratch, bias)
    return both[:, :N], both[:, N:]


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply at most 128 rows by a quantised weight, without gradients.

    Raises `ValueError` when there are more rows, K does not fit, or the format goes dense.

    Parameters
    ----------
    x : Tensor, (..., K), bfloat16 or float16 (float32 in the interpreter)
    weight
        (N, K), NVFP4 or MXFP4, in the checkpoint's layout.
    bias : Tensor or None, (N,)

    Returns
    -------
    Tensor, (..., N), the type of x
    """
    N, K = weight.shape
    flat = x.reshape(-1, x.shape[-1])
    M = flat.shape[0]
    if flat.shape[1] != K or goes_dense(weight, M):
        raise ValueError(
            f"x has {M} rows of {flat.shape[1]} channels and W {weight.format} codes; this kernel "
            f"needs at most {MOST_ROWS} rows of {K} channels, and nvfp4 or mxfp4 codes"
        )
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if M:
        _launch(flat, weight, bias, out)
    return out.view(*x.shape[:-1], N)


def _launch(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    (M, K), N = x.shape, out.shape[1]
    groups = K // 16
    kind = FORMATS[weight.format].number
    # Rows of W per program, groups of columns per step, and how many programs there should be.
    block_n, blocks, programs = (8, 32, 2112) if M == 1 else (64, 8, 528 if M <= 32 else 264)
    row_blocks = triton.cdiv(N, block_n)
    steps = triton.cdiv(groups, blocks)
    splits = max(1, min(16, programs // row_blocks, steps))
    if row_blocks > _COUNTERS:
        splits = 1
    # As many steps each: no program without work but for the last.
    splits = triton.cdiv(steps, triton.cdiv(steps, splits))
    target, arrived = out, None
    if splits > 1:
        target = torch.empty(splits, M, N, dtype=torch.float32, device=x.device)
        if x.is_cuda:
            # Zero again after every launch; launches of one stream never overlap.
            arrived = _counters(x.device.index, torch.cuda.current_stream().cuda_stream)
        else:
            arrived = torch.zeros(row_blocks, dtype=torch.int32)
    codes = weight.codes.contiguous().view(torch.int64)
    scales = weight.block_scales.view(torch.uint8).contiguous()
    arguments = (codes, scales, weight.encode_scale, bias, target, out, arrived, M, N)
    cut = (groups, weight.block // 16, kind, splits)
    block = (block_n, blocks, bias is not None)
    if M == 1:
        turned = x.reshape(groups, 16).t().contiguous()  # (16, groups): by place in a group
        _one_kernel[(row_blocks, splits)](
            turned, *arguments, *cut, *block, num_warps=4, num_stages=2, **FUSED
        )
    else:
        x = x if x.stride(1) == 1 else x.contiguous()
        widen = x.device.type == "cpu" or x.dtype == torch.float32
        # A tile of 128 rows and its sums outgrow the registers of four warps.
        warps = 4 if M <= 64 else 8
        constants = (*cut, max(16, triton.next_power_of_2(M)), *block, widen)
        _tile_kernel[(row_blocks, splits)](
            x, *arguments, x.stride(0), *constants, num_warps=warps, num_stages=3, **FUSED
        )
