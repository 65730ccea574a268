"""Decode attention over a paged cache: grouped queries, split contexts, shared prompts, in Triton.

One new position a row attends to everything cached for that row. What costs is reading keys and
values once, so the work is arranged around reads:

    grouped queries   the Hq / Hkv query heads of one key head form the rows of one small product
    splits            a long context is cut into parts that run at once; each leaves its maximum m,
                      its sum l of exp(score - m) and its weighted values, and a second kernel joins
                      them:  out = sum_i exp(m_i - m) acc_i / sum_i exp(m_i - m) l_i
    shared prefix     the G completions of one prompt share the prompt's blocks, so their
                      G * Hq / Hkv query rows are taken together and the prefix is read once

Easy to get wrong: a split that lies past a row's end leaves m = -inf and must weigh nothing;
blocks past the end may hold NaN, so values are masked as they are loaded, not by weight; how a
context is split must not depend on the other rows if results are to be batch-invariant: the
number of splits is a function of the shapes alone, and of `splits` where it is given.

`kernels.reference.decode_attention` is the specification.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that keep a large GPU's memory busy: four on each of about 132 multiprocessors. More
# splits measured slower on an H200 (7B heads, 64 rows of 2048: 72.6, 75.6, 80.5 us for 2, 4, 8).
_WANTED_PROGRAMS = 512
_POSITIONS = 64


@triton.jit
def _split_kernel(
    q, key_cache, value_cache, block_table, starts, ends, sums, maxima, weights, scale,
    table_stride, slot0, slots, block_size: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    SHARE: tl.constexpr = HQ // HKV
    # Row i of the product is query head i % SHARE of member i // SHARE of the group.
    i = tl.arange(0, ROWS)
    row = (group * GROUP + i // SHARE).to(tl.int64)
    held_row = i < GROUP * SHARE
    d = tl.arange(0, D)
    q_at = (row * HQ + head * SHARE + i % SHARE) * D
    queries = tl.load(q + q_at[:, None] + d[None, :], mask=held_row[:, None], other=0.0)
    # Parts are whole tiles, so that no tile is read twice.
    begin = tl.load(starts + group * GROUP)
    end = tl.load(ends + group * GROUP)
    tiles = tl.cdiv(tl.maximum(end - begin, 0), POSITIONS)
    first = begin + tiles * split // SPLITS * POSITIONS
    last = tl.minimum(end, begin + tiles * (split + 1) // SPLITS * POSITIONS)
    table = block_table + (group * GROUP).to(tl.int64) * table_stride

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    n = tl.arange(0, POSITIONS)
    for at in range(first, last, POSITIONS):
        position = at + n
        held = position < last
        block = tl.load(table + position // block_size, mask=held, other=0).to(tl.int64)
        base = ((block * block_size + position % block_size) * HKV + head) * D
        keys = tl.load(key_cache + base[:, None] + d[None, :], mask=held[:, None], other=0.0)
        values = tl.load(value_cache + base[:, None] + d[None, :], mask=held[:, None], other=0.0)
        if WIDEN:
            scores = tl.dot(
                queries.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision="ieee"
            )
        else:
            scores = tl.dot(queries, tl.trans(keys))
        scores = tl.where(held[None, :], scores * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        rescale = tl.exp2(maximum - new_maximum)
        p = tl.exp2(scores - new_maximum[:, None])
        total = total * rescale + tl.sum(p, 1)
        if WIDEN:
            acc = acc * rescale[:, None]
            acc += tl.dot(p, values.to(tl.float32), input_precision="ieee")
        else:
            acc = acc * rescale[:, None] + tl.dot(p.to(values.dtype), values)
        maximum = new_maximum
    part = (row * HQ + head * SHARE + i % SHARE) * slots + slot0 + split
    tl.store(maxima + part, maximum, mask=held_row)
    tl.store(weights + part, total, mask=held_row)
    tl.store(sums + part[:, None] * D + d[None, :], acc, mask=held_row[:, None])


@triton.jit
def _join_kernel(sums, maxima, weights, out, slots, D: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SLOTS)
    d = tl.arange(0, D)
    held = s < slots
    m = tl.load(maxima + row * slots + s, mask=held, other=float("-inf"))
    l = tl.load(weights + row * slots + s, mask=held, other=0.0)
    top = tl.max(m, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(m - top)
    total = tl.sum(share * l, 0)
    parts = tl.load(
        sums + (row * slots + s[:, None]) * D + d[None, :], mask=held[:, None], other=0.0
    )
    value = tl.sum(parts * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * D + d, value.to(out.dtype.element_ty))


def default_splits(rows: int, heads: int, positions: int) -> int:
    """Return into how many parts contexts of up to `positions` are cut: shapes alone decide."""
    wanted = triton.cdiv(_WANTED_PROGRAMS, max(1, rows * heads))
    return max(1, min(64, triton.cdiv(positions, _POSITIONS), wanted))


def decode_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    *,
    prefix_lengths: Tensor | None = None,
    group_size: int = 1,
    splits: int | None = None,
) -> Tensor:
    """Attend from one new position a row to everything cached for that row.

    Parameters
    ----------
    q : Tensor, (B, Hq, D), bfloat16 or float16 (float32 in the interpreter)
    key_cache, value_cache : Tensor, (num_blocks, block_size, Hkv, D), contiguous
    block_table : Tensor, (B, max_blocks), int32 or int64
    lengths : Tensor, (B,), int32
        Positions cached, the new one included; 0 gives a row of zeros. Not checked here: that
        would wait for the device.
    scale
        Factor on the scores; None is 1 / sqrt(D).
    prefix_lengths : Tensor or None, (B,), int32
        Positions at the start of a row that all `group_size` rows of its group share, block for
        block (rows g * group_size .. + group_size - 1). They are read once a group.
    group_size
        Rows a group; B must be a multiple.
    splits
        Parts of a context; None decides by the shapes.

    Returns
    -------
    Tensor, (B, Hq, D), the type of q

    Raises
    ------
    ValueError
        When heads, head dimension, groups or layout do not fit.
    """
    B, Hq, D = q.shape
    _, block_size, Hkv, _ = key_cache.shape
    if Hq % Hkv or D & (D - 1):
        raise ValueError(
            f"q has {Hq} heads of {D}; the cache's {Hkv} heads must divide them, and the head "
            "dimension must be a power of two"
        )
    if not (q.is_contiguous() and key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("q, key_cache and value_cache must be contiguous")
    if prefix_lengths is not None and (group_size < 1 or B % group_size):
        raise ValueError(f"{B} rows do not form groups of {group_size}")
    out = torch.empty_like(q)
    if B == 0:
        return out
    share = Hq // Hkv
    capacity = block_table.shape[1] * block_size
    own = splits or default_splits(B, Hkv, capacity)
    shared = 0
    if prefix_lengths is not None:
        shared = splits or default_splits(B // group_size, Hkv, capacity)
    slots = own + shared
    sums = torch.empty(B, Hq, slots, D, dtype=torch.float32, device=q.device)
    maxima = torch.empty(2, B, Hq, slots, dtype=torch.float32, device=q.device)
    factor = (1.0 / math.sqrt(D) if scale is None else scale) * math.log2(math.e)
    widen = q.device.type == "cpu" or q.dtype == torch.float32

    def run(group: int, starts: Tensor, ends: Tensor, first_slot: int, parts: int) -> None:
        rows = max(16, triton.next_power_of_2(group * share))
        _split_kernel[(B // group, Hkv, parts)](
            q, key_cache, value_cache, block_table, starts, ends, sums, maxima[0], maxima[1],
            factor, block_table.stride(0), first_slot, slots, block_size, Hq, Hkv, D, group,
            parts, rows, _POSITIONS, widen, num_warps=4, num_stages=2,
        )  # fmt: skip

    if prefix_lengths is None:
        run(1, torch.zeros_like(lengths), lengths, 0, own)
    else:
        run(group_size, torch.zeros_like(lengths), prefix_lengths, 0, shared)
        run(1, prefix_lengths, lengths, shared, own)
    _join_kernel[(B * Hq,)](
        sums, maxima[0], maxima[1], out, slots, D, triton.next_power_of_2(slots), num_warps=2
    )
    return out
