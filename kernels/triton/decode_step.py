"""The operations between the products of a decode step, in as few launches as possible, in Triton.

A step of a small batch is bound by launches, not by bytes: every kernel here does all that lies
between two products, and under *programmatic dependent launch* (`overlap`) starts while the kernel
before it drains. A long context is split over programs, and the last to arrive joins the splits.
`kernels.reference_step` is the specification.

Easy to get wrong: under dependent launch only what no kernel of the step writes (gains, tables) may
be loaded before `gdc_wait`; the new key is not yet in the cache for the other programs of its row,
so the last split takes it from registers and the cache is read up to the position before; the
counter of arrivals must be zero again for the next launch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_step import Heads, LayerCache, Rotation
from kernels.triton import FUSED

# Programs that keep a large GPU busy with one decode attention.
_ENOUGH_PROGRAMS = 264
_MAX_SPLITS = 8


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait for what the kernel ahead writes."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _add_norm_kernel(
    residual, update, gain, noise, stream, normed, update_stride, eps,
    H: tl.constexpr, BLOCK: tl.constexpr,
    HAS_UPDATE: tl.constexpr, HAS_NOISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    valid = at < H
    # Load the gain: the launch before does not write it.
    factor = tl.load(gain + at, mask=valid, other=0.0).to(tl.float32)
    if HAS_NOISE:
        factor += tl.load(noise + at, mask=valid, other=0.0)
    wait(OVERLAP)
    # Add the update and store the stream; the norm is that of the rounded sum.
    value = tl.load(residual + row * H + at, mask=valid, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        value += tl.load(update + row * update_stride + at, mask=valid, other=0.0).to(tl.float32)
        value = value.to(stream.dtype.element_ty)
        tl.store(stream + row * H + at, value, mask=valid)
        value = value.to(tl.float32)
    # Normalise, round, apply the gain and store.
    scale = tl.rsqrt(tl.sum(value * value) / H + eps)
    rounded = (value * scale).to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + row * H + at, (factor * rounded).to(normed.dtype.element_ty), mask=valid)


def add_norm(
    residual: Tensor,
    update: Tensor | None,
    gain: Tensor,
    noise: Tensor | None,
    eps: float,
    *,
    overlap: bool,
) -> tuple[Tensor, Tensor]:
    """Return the residual stream with `update` added, and its norm; no gradients.

    As `kernels.reference_step.add_norm`. `residual` must be contiguous, rows of `update` may be
    strided; `overlap` launches before the kernel ahead has ended (Hopper).
    """
    M, H = residual.shape
    if update is not None and (update.shape != residual.shape or update.stride(1) != 1):
        raise ValueError(
            f"update has shape {tuple(update.shape)} and strides {update.stride()}; it must be "
            f"{(M, H)} with contiguous rows"
        )
    normed = torch.empty_like(residual)
    stream = residual if update is None else torch.empty_like(residual)
    block = triton.next_power_of_2(H)
    tensors = (residual, update, gain, noise, stream, normed)
    stride = 0 if update is None else update.stride(0)
    constants = (H, block, update is not None, noise is not None, overlap)
    warps = 4 if block <= 1024 else 8 if block <= 4096 else 16
    _add_norm_kernel[(M,)](*tensors, stride, eps, *constants, num_warps=warps, **launch(overlap))
    return stream, normed


def launch(overlap: bool) -> dict[str, bool]:
    """Return the options of a launch, dependent on the one ahead or not."""
    return FUSED | ({"launch_pdl": True} if overlap else {})


@triton.jit
def _turned(
    low, high,
    cos, sin, at, half, D: tl.constexpr,
    gain, eps, HAS_GAIN: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Apply the head norm and rotate: low and high are the halves, (rows, D / 2), float32."""
    # The head norm, rounded before the gain and after it, as the reference rounds.
    if HAS_GAIN:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)
        gain_low = tl.load(gain + half).to(tl.float32)
        gain_high = tl.load(gain + D // 2 + half).to(tl.float32)
        low = (low * scale[:, None]).to(TYPE).to(tl.float32) * gain_low[None, :]
        high = (high * scale[:, None]).to(TYPE).to(tl.float32) * gain_high[None, :]
        low = low.to(TYPE).to(tl.float32)
        high = high.to(TYPE).to(tl.float32)
    # The rotation, (1, D / 2) of angles over all rows.
    cos_low = tl.load(cos + at * D + half).to(tl.float32)[None, :]
    cos_high = tl.load(cos + at * D + D // 2 + half).to(tl.float32)[None, :]
    sin_low = tl.load(sin + at * D + half).to(tl.float32)[None, :]
    sin_high = tl.load(sin + at * D + D // 2 + half).to(tl.float32)[None, :]
    return low * cos_low - high * sin_low, high * cos_high + low * sin_high


@triton.jit
def _attend_kernel(
    qkv, cos, sin, positions, table, key_cache, value_cache,
    q_gain, k_gain, out, partial, arrived,
    factor, eps, qkv_stride, table_stride,
    block_size: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    HAS_GAIN: tl.constexpr, WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    SHARE: tl.constexpr = HQ // HKV
    TYPE: tl.constexpr = out.dtype.element_ty
    i = tl.arange(0, ROWS)
    valid_row = i < SHARE
    half = tl.arange(0, D // 2)
    d = tl.arange(0, D)
    wait(OVERLAP)
    position = tl.load(positions + row)
    runs = position >= 0
    # A row that does not run must read in range too.
    at = tl.maximum(position, 0).to(tl.int64)

    # Queries, rotated: the query heads of this key head are the rows of a small product.
    source = qkv + row * qkv_stride
    q_at = source + (head * SHARE + i[:, None]) * D + half[None, :]
    low = tl.load(q_at, mask=valid_row[:, None], other=0.0).to(tl.float32)
    high = tl.load(q_at + D // 2, mask=valid_row[:, None], other=0.0).to(tl.float32)
    low, high = _turned(low, high, cos, sin, at, half, D, q_gain, eps, HAS_GAIN, TYPE)
    q_low = low.to(TYPE)
    q_high = high.to(TYPE)

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    if (split == SPLITS - 1) & runs:
        # The new token, in the last split: into the cache for later steps, and from registers for
        # this one. It begins the softmax: its own score is the maximum so far, its weight 1.
        k_at = source + (HQ + head) * D + half[None, :]
        k_low = tl.load(k_at).to(tl.float32)
        k_high = tl.load(k_at + D // 2).to(tl.float32)
        k_low, k_high = _turned(k_low, k_high, cos, sin, at, half, D, k_gain, eps, HAS_GAIN, TYPE)
        k_low = k_low.to(key_cache.dtype.element_ty)
        k_high = k_high.to(key_cache.dtype.element_ty)
        value = tl.load(source + (HQ + HKV + head) * D + d).to(value_cache.dtype.element_ty)
        block = tl.load(table + row * table_stride + at // block_size).to(tl.int64)
        slot = ((block * block_size + at % block_size) * HKV + head) * D
        tl.store(key_cache + slot + half[None, :], k_low)
        tl.store(key_cache + slot + D // 2 + half[None, :], k_high)
        tl.store(value_cache + slot + d, value)
        score = tl.sum(q_low.to(tl.float32) * k_low.to(TYPE).to(tl.float32), 1)
        score += tl.sum(q_high.to(tl.float32) * k_high.to(TYPE).to(tl.float32), 1)
        maximum = score * factor
        total = tl.full((ROWS,), 1.0, tl.float32)
        acc += value.to(tl.float32)[None, :]

    # The walk of a split over the cached tokens before the new one, in whole tiles per split.
    length = tl.maximum(position, 0)
    tiles = tl.cdiv(length, TILE)
    first = tiles * split // SPLITS * TILE
    last = tl.minimum(length, tiles * (split + 1) // SPLITS * TILE)
    n = tl.arange(0, TILE)
    for begin in range(first, last, TILE):
        where = begin + n
        valid = where < last
        # Load keys in halves, (TILE, D / 2) each, and values, (TILE, D).
        block = tl.load(table + row * table_stride + where // block_size, mask=valid, other=0)
        base = ((block.to(tl.int64) * block_size + where % block_size) * HKV + head) * D
        key_at = key_cache + base[:, None] + half[None, :]
        k_low = tl.load(key_at, mask=valid[:, None], other=0.0).to(TYPE)
        k_high = tl.load(key_at + D // 2, mask=valid[:, None], other=0.0).to(TYPE)
        values = tl.load(value_cache + base[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        values = values.to(TYPE)
        # Scores, (ROWS, TILE): the products of both halves.
        if WIDEN:
            scores = tl.dot(q_low.to(tl.float32), tl.trans(k_low.to(tl.float32)))
            scores += tl.dot(q_high.to(tl.float32), tl.trans(k_high.to(tl.float32)))
        else:
            scores = tl.dot(q_low, tl.trans(k_low))
            scores = tl.dot(q_high, tl.trans(k_high), scores)
        scores = tl.where(valid[None, :], scores * factor, float("-inf"))
        # Softmax so far: what was summed moves to the new maximum, (ROWS,).
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        rescale = tl.exp2(maximum - new_maximum)
        p = tl.exp2(scores - new_maximum[:, None])
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if WIDEN:
            acc += tl.dot(p, values.to(tl.float32))
        else:
            acc = tl.dot(p.to(TYPE), values, acc)
        maximum = new_maximum

    # Store, (ROWS, D); only the first SHARE rows are heads.
    target = out + (row * HQ + head * SHARE + i[:, None]) * D + d[None, :]
    if SPLITS == 1:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(target, result.to(TYPE), mask=valid_row[:, None])
    else:
        # The join: a split leaves its sum, total and maximum; the last to arrive joins them.
        PART: tl.constexpr = ROWS * (D + 2)
        pair = row * HKV + head
        part_at = partial + (pair * SPLITS + split) * PART
        tl.store(part_at + i[:, None] * D + d[None, :], acc)
        tl.store(part_at + ROWS * D + i, total)
        tl.store(part_at + ROWS * D + ROWS + i, maximum)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + pair, 1, sem="acq_rel")
        if before == SPLITS - 1:
            tl.store(arrived + pair, 0)
            # Maxima and totals of all splits at once, and sums unrolled: one by one, each load
            # would wait for the L2 in turn.
            others = partial + pair * SPLITS * PART
            s = tl.arange(0, SPLITS)
            # (ROWS, SPLITS): totals, and maxima ROWS behind them
            ends_at = others + s[None, :] * PART + ROWS * D + i[:, None]
            totals = tl.load(ends_at, cache_modifier=".cg")
            maxima = tl.load(ends_at + ROWS, cache_modifier=".cg")
            top = tl.max(maxima, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(totals * tl.exp2(maxima - top[:, None]), 1)
            acc = tl.zeros((ROWS, D), tl.float32)
            for other in tl.static_range(SPLITS):
                left = others + other * PART
                weight = tl.exp2(tl.load(left + ROWS * D + ROWS + i, cache_modifier=".cg") - top)
                sums_at = left + i[:, None] * D + d[None, :]
                sums = tl.load(sums_at, mask=valid_row[:, None], other=0.0, cache_modifier=".cg")
                acc += sums * weight[:, None]
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(target, result.to(TYPE), mask=valid_row[:, None])


class StepWorkspace:
    """Memory that the splits of `attend_step` meet in, for up to `rows` rows.

    One launch at a time may use it: launches on one stream do.
    """

    def __init__(self, rows: int, query_heads: int, key_heads: int, dim: int, device: torch.device):
        self.rows = max(16, triton.next_power_of_2(query_heads // key_heads))
        self.splits = {m: _splits(m, key_heads) for m in range(1, rows + 1)}
        parts = max(m * key_heads * s for m, s in self.splits.items())
        self.partial = torch.zeros(
            parts * self.rows * (dim + 2), dtype=torch.float32, device=device
        )
        self.arrived = torch.zeros(rows * key_heads, dtype=torch.int32, device=device)


def _splits(rows: int, key_heads: int) -> int:
    splits = _ENOUGH_PROGRAMS / (rows * key_heads)
    return max(1, min(_MAX_SPLITS, triton.next_power_of_2(math.ceil(splits))))


def attend_step(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    cache: LayerCache,
    heads: Heads,
    rotation: Rotation,
    workspace: StepWorkspace,
    *,
    overlap: bool,
) -> Tensor:
    """Write one new token per row into the cache and attend from it to all of its row.

    As `kernels.reference_step.attend_step`. Caches must be contiguous, rows of `qkv` may be
    strided. Other layouts raise.
    """
    M, query_heads = qkv.shape[0], heads.query
    _, block_size, key_heads, D = cache.keys.shape
    width = (query_heads + 2 * key_heads) * D
    if qkv.shape[1] != width or qkv.stride(1) != 1 or D & (D - 1) or D < 32:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; {query_heads} query and {key_heads} key heads of "
            f"{D} need (M, {width}), rows contiguous, and a head dimension of 32, 64, 128 or 256"
        )
    if len(workspace.splits) < M:
        raise ValueError(f"{M} rows; the workspace was made for {len(workspace.splits)}")
    out = torch.empty(M, query_heads * D, dtype=qkv.dtype, device=qkv.device)
    splits = workspace.splits[M]
    inputs = (qkv, rotation.cos, rotation.sin, positions, table, cache.keys, cache.values)
    others = (heads.q_gain, heads.k_gain, out, workspace.partial, workspace.arrived)
    numbers = (heads.scaling * math.log2(math.e), heads.eps, qkv.stride(0), table.stride(0))
    sizes = (block_size, query_heads, key_heads, D, workspace.rows, splits, 64)
    flags = (heads.q_gain is not None, qkv.dtype == torch.float32, overlap)
    _attend_kernel[(M, key_heads, splits)](
        *inputs, *others, *numbers, *sizes, *flags, num_warps=4, num_stages=3, **launch(overlap)
    )
    return out


@triton.jit
def _swiglu_kernel(gate_up, y, stride, I: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = at < I
    # Load gate and up, (BLOCK,) each: the launch before writes both.
    wait(OVERLAP)
    gate = tl.load(gate_up + row * stride + at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + I + at, mask=valid, other=0.0).to(tl.float32)
    # Activate, rounded before the product, and store.
    active = (gate * tl.sigmoid(gate)).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * I + at, (active * up).to(y.dtype.element_ty), mask=valid)


def swiglu(gate_up: Tensor, *, overlap: bool) -> Tensor:
    """Return silu(gate) * up, (M, I), of (M, 2 I) whose rows may be strided; no gradients."""
    M, I = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1 or gate_up.shape[1] % 2:
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}; it must be (M, 2 I), rows whole"
        )
    y = torch.empty(M, I, dtype=gate_up.dtype, device=gate_up.device)
    block = 512 if M < 64 else 1024
    if M:
        _swiglu_kernel[(M, triton.cdiv(I, block))](
            gate_up, y, gate_up.stride(0), I, block, overlap, num_warps=4, **launch(overlap)
        )
    return y
