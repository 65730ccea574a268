"""Attention of many new tokens over a paged cache, causal, rows of any length, in Triton.

A prefill chunk holds pieces of several sequences one after another. Their keys and values are in
the cache already (this chunk's too), so a program takes a tile of up to 64 tokens of one sequence
and one query head, and walks the sequence's blocks from its beginning to the tile's own end, with
the online softmax. A sequence that was begun in an earlier chunk, or that shares the blocks of its
prompt with others, is no special case.

Tiles of row -1 are padding: they read no cache and give zeros, so that no row of the output is left
unwritten.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_step import LayerCache
from kernels.triton import FUSED, on_hopper


@triton.jit
def _prefill_kernel(
    q, key_cache, value_cache, table, tiles, out,
    factor, table_stride,
    block_size: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (HQ // HKV)
    # What the tile is: its sequence, its first token, how many, and where they stand.
    row = tl.load(tiles + tile * 4)
    first = tl.load(tiles + tile * 4 + 1)
    count = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    i = tl.arange(0, TILE)
    d = tl.arange(0, D)
    valid_row = i < count
    # Load queries, (TILE, D).
    at = ((first + i).to(tl.int64) * HQ + head) * D
    queries = tl.load(q + at[:, None] + d[None, :], mask=valid_row[:, None], other=0.0)
    TYPE: tl.constexpr = queries.dtype
    maximum = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, D), tl.float32)
    n = tl.arange(0, KEYS)
    blocks = table + row.to(tl.int64) * table_stride
    # A tile of padding has nothing to attend to.
    end = tl.where(row < 0, 0, position + count)
    for begin in range(0, end, KEYS):
        where = begin + n
        valid = where < end
        # Load keys and values, (KEYS, D) each, through the table.
        block = tl.load(blocks + where // block_size, mask=valid, other=0).to(tl.int64)
        base = ((block * block_size + where % block_size) * HKV + key_head) * D
        keys = tl.load(key_cache + base[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        values = tl.load(value_cache + base[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        keys = keys.to(TYPE)
        values = values.to(TYPE)
        # Scores, (TILE, KEYS), -inf where a key is later than the query.
        if WIDEN:
            scores = tl.dot(queries.to(tl.float32), tl.trans(keys.to(tl.float32)))
        else:
            scores = tl.dot(queries, tl.trans(keys))
        seen = where[None, :] <= position + i[:, None]
        scores = tl.where(seen & valid[None, :], scores * factor, float("-inf"))
        # Softmax so far: what was summed moves to the new maximum, (TILE,).
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
    # Divide and store, (TILE, D).
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at[:, None] + d[None, :], result.to(TYPE), mask=valid_row[:, None])


def prefill_attention(
    q: Tensor, cache: LayerCache, table: Tensor, tiles: Tensor, scale: float, *, tile: int = 64
) -> Tensor:
    """Attend from new tokens, each to its own sequence up to itself: (M, Hq * D).

    As `kernels.reference_step.prefill_attention`. q, (M, Hq, D), and the cache must be contiguous;
    a tile has at most `tile` tokens; what is in no tile is not written.
    """
    M, query_heads, D = q.shape
    _, block_size, key_heads, _ = cache.keys.shape
    if not q.is_contiguous() or query_heads % key_heads or D & (D - 1):
        raise ValueError(
            f"q has shape {tuple(q.shape)}; it must be contiguous, its heads a multiple of the "
            f"cache's {key_heads}, its head dimension a power of two"
        )
    out = torch.empty(M, query_heads * D, dtype=q.dtype, device=q.device)
    # Elsewhere operands take registers, and tiles of 64 keys would not leave enough of them.
    keys = 64 if on_hopper(q.device) else 32
    tensors = (q, cache.keys, cache.values, table, tiles, out)
    numbers = (scale * math.log2(math.e), table.stride(0))
    constants = (block_size, query_heads, key_heads, D, tile, keys, q.dtype == torch.float32)
    _prefill_kernel[(len(tiles), query_heads)](
        *tensors, *numbers, *constants, num_warps=4, num_stages=2, **FUSED
    )
    return out
