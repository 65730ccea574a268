"""From rows that enter to tensors: the chunks of a prefill, and what stands in a row's slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from repro.rollout.draw import uniforms
from repro.rollout.ops import TILE, NewTokens
from repro.rollout.scheduler import Row, Segment
from repro.rollout.state import Entry


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
    segments: Sequence[Segment], block_size: int, push: Callable[[Tensor], Tensor]
) -> tuple[Tensor, NewTokens]:
    """Return a chunk's tokens, (M,) int64, and where they stand, on the device.

    Parameters
    ----------
    push
        Takes a host tensor to the device.
    """
    tokens: list[int] = []
    positions, slots, lengths, tiles = [], [], [], []
    width = max(len(segment.row.blocks) for segment in segments)
    table = np.zeros((len(segments), width), dtype=np.int32)
    for number, segment in enumerate(segments):
        blocks = segment.row.blocks
        table[number, : len(blocks)] = blocks
        at = np.arange(segment.start, segment.end, dtype=np.int32)
        positions.append(at)
        slots.append(table[number, at // block_size] * block_size + at % block_size)
        lengths.append((len(tokens), len(at), segment.start))
        for first in range(0, len(at), TILE):
            count = min(TILE, len(at) - first)
            tiles.append((number, len(tokens) + first, count, segment.start + first))
        tokens += segment.row.sequence[segment.start : segment.end]
    new = NewTokens(
        positions=push(torch.from_numpy(np.concatenate(positions))),
        slots=push(torch.from_numpy(np.concatenate(slots))),
        table=push(torch.from_numpy(table)),
        lengths=lengths,
        tiles=push(torch.tensor(tiles, dtype=torch.int32)),
    )
    return push(torch.tensor(tokens, dtype=torch.int64)), new


def entry_of(row: Row) -> Entry:
    """Return what a row that enters puts into its slot: its last token is the first to be fed."""
    assert row.slot is not None
    sequence = row.sequence
    return Entry(
        slot=row.slot,
        token=sequence[-1],
        position=len(sequence) - 1,
        count=len(row.tokens),
        limit=row.limit,
        uniforms=uniforms([row.seed], row.limit)[0],
    )
