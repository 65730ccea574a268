"""The tensors for admitted rows: the chunks of a prefill.

What the forward pass of a chunk reads is one block of int32 numbers, so that one copy takes it to
the device:

    tokens (M) | positions (M) | slots (M) | tiles (T, 4) | table (rows, max_blocks)

Easy to get wrong: a tensor's address decides which variant of a Triton kernel is compiled, so each
part of the block begins at a multiple of 16 bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.segments import sent
from repro.rollout.backend import TILE, NewTokens
from repro.rollout.scheduler import Segment

# int32 numbers in 16 bytes.
_ALIGNED = 4


def chunks_of(segments: Sequence[Segment], tokens: int) -> list[list[Segment]]:
    """Cut segments, in order, into chunks of at most `tokens` tokens."""
    chunks: list[list[Segment]] = [[]]
    room = tokens
    for segment in segments:
        start = segment.start
        while start < segment.end:
            end = min(segment.end, start + room)
            chunks[-1].append(Segment(row=segment.row, start=start, end=end))
            room -= end - start
            start = end
            if room == 0:
                chunks.append([])
                room = tokens
    return [chunk for chunk in chunks if chunk]


def new_tokens(
    segments: Sequence[Segment], block_size: int, max_blocks: int, device: torch.device
) -> tuple[Tensor, NewTokens]:
    """Return a chunk's tokens, (M,) int32, and their positions, on the device."""
    M = sum(segment.end - segment.start for segment in segments)
    starts = itertools.accumulate((s.end - s.start for s in segments), initial=0)
    tiles = [
        (row, begin + first, min(TILE, segment.end - segment.start - first), segment.start + first)
        for row, (segment, begin) in enumerate(zip(segments, starts, strict=False))
        for first in range(0, segment.end - segment.start, TILE)
    ]
    sizes = M, M, M, 4 * len(tiles), len(segments) * max_blocks
    room = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    numbers = torch.zeros(sum(room), dtype=torch.int32)
    parts = zip(numbers.split(room), sizes, strict=True)
    tokens, positions, slots, tile, table = (part[:size].numpy() for part, size in parts)
    tile[:] = np.array(tiles, dtype=np.int32).ravel()
    begin = 0
    for number, segment in enumerate(segments):
        blocks = np.array(segment.row.blocks, dtype=np.int32)
        table[number * max_blocks :][: len(blocks)] = blocks
        at = np.arange(segment.start, segment.end, dtype=np.int32)
        end = begin + len(at)
        tokens[begin:end] = segment.row.sequence[segment.start : segment.end]
        positions[begin:end] = at
        slots[begin:end] = blocks[at // block_size] * block_size + at % block_size
        begin = end
    parts = zip(sent(numbers, device).split(room), sizes, strict=True)
    there = [part[:size] for part, size in parts]
    new = NewTokens(
        positions=there[1],
        slots=there[2],
        tiles=there[3].view(-1, 4),
        table=there[4].view(-1, max_blocks),
    )
    return there[0], new
