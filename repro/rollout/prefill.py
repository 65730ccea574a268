"""From rows that enter to tensors: the chunks of a prefill, and what stands in a row's slot.

What the forward pass of a chunk reads is one block of int32 numbers, so that one copy takes it to
the device, and in a captured prefill to the place that the capture reads:

    tokens (M) | positions (M) | slots (M) | tiles (T, 4) | table (rows, max_blocks)

A captured prefill has a fixed shape, a *bucket*: chunks are padded up to the next of `BUCKETS`.
From 128 tokens on the padding is less than a third of the bucket; below, products wait for the
weights, and padding costs next to nothing.

Easy to get wrong: a tensor's address decides which variant of a Triton kernel is compiled, so each
part of the block begins at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from repro.rollout.draw import uniforms
from repro.rollout.ops import TILE, NewTokens
from repro.rollout.scheduler import Row, Segment
from repro.rollout.state import Entry

# Tokens of captured prefills.
BUCKETS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
# Rows a bucket has room for: one in so many tokens, and some even in the smallest.
_TOKENS_PER_ROW, _LEAST_ROWS = 8, 8
# int32 numbers in 16 bytes.
_ALIGNED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShape:
    """Sizes of a chunk's numbers: M, T, rows and max_blocks."""

    tokens: int
    tiles: int
    rows: int
    blocks: int

    @property
    def numbers(self) -> int:
        """All int32 numbers, the gaps between parts included."""
        return sum(-(-count // _ALIGNED) * _ALIGNED for count in self._counts())

    def _counts(self) -> tuple[int, ...]:
        M = self.tokens
        return M, M, M, 4 * self.tiles, self.rows * self.blocks

    def parts(self, numbers: Tensor) -> tuple[Tensor, NewTokens]:
        """Return a chunk's tokens, (M,) int32, and where they stand, as views of its numbers."""
        pieces, at = [], 0
        for count in self._counts():
            pieces.append(numbers[at : at + count])
            at += -(-count // _ALIGNED) * _ALIGNED
        tokens, positions, slots, tiles, table = pieces
        new = NewTokens(
            positions=positions,
            slots=slots,
            tiles=tiles.view(self.tiles, 4),
            table=table.view(self.rows, self.blocks),
        )
        return tokens, new


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


def tokens_of(segments: Sequence[Segment]) -> int:
    """Return the number of tokens of a chunk."""
    return sum(segment.end - segment.start for segment in segments)


def exact_shape(segments: Sequence[Segment], max_blocks: int) -> ChunkShape:
    """Return the shape of a chunk without padding."""
    tiles = sum(-(-(segment.end - segment.start) // TILE) for segment in segments)
    return ChunkShape(
        tokens=tokens_of(segments), tiles=tiles, rows=len(segments), blocks=max_blocks
    )


def padded_shape(
    segments: Sequence[Segment], *, most_tokens: int, slots: int, max_blocks: int
) -> ChunkShape | None:
    """Return the bucket of a chunk, or None where it has too many tokens or too many rows."""
    tokens = tokens_of(segments)
    for bucket in BUCKETS:
        if tokens <= bucket <= most_tokens:
            rows = min(slots, max(_LEAST_ROWS, bucket // _TOKENS_PER_ROW))
            if len(segments) > rows:
                return None
            # Each row, and the padding after them, may end in a tile that is not full.
            tiles = -(-bucket // TILE) + rows
            return ChunkShape(tokens=bucket, tiles=tiles, rows=rows, blocks=max_blocks)
    return None


def numbers_of(segments: Sequence[Segment], shape: ChunkShape, block_size: int) -> Tensor:
    """Return a chunk's numbers, (shape.numbers,) int32, on the host, padded to `shape`."""
    numbers = torch.zeros(shape.numbers, dtype=torch.int32)
    all_tokens, new = shape.parts(numbers)
    tokens, positions, slots = all_tokens.numpy(), new.positions.numpy(), new.slots.numpy()
    table = new.table.numpy()
    tiles: list[tuple[int, int, int, int]] = []
    begin = 0
    for number, segment in enumerate(segments):
        blocks = np.array(segment.row.blocks, dtype=np.int32)
        table[number, : len(blocks)] = blocks
        at = np.arange(segment.start, segment.end, dtype=np.int32)
        end = begin + len(at)
        tokens[begin:end] = segment.row.sequence[segment.start : segment.end]
        positions[begin:end] = at
        slots[begin:end] = blocks[at // block_size] * block_size + at % block_size
        tiles += _tiles(number, begin, end, segment.start)
        begin = end
    slots[begin:] = -1
    tiles += _tiles(-1, begin, shape.tokens, 0)
    tiles += [(-1, 0, 0, 0)] * (shape.tiles - len(tiles))
    new.tiles.copy_(torch.tensor(tiles, dtype=torch.int32))
    return numbers


def _tiles(row: int, begin: int, end: int, position: int) -> list[tuple[int, int, int, int]]:
    return [
        (row, first, min(TILE, end - first), position + first - begin)
        for first in range(begin, end, TILE)
    ]


def new_tokens(
    segments: Sequence[Segment],
    block_size: int,
    max_blocks: int,
    push: Callable[[Tensor], Tensor],
) -> tuple[Tensor, NewTokens]:
    """Return a chunk's tokens, (M,) int32, and where they stand, on the device, unpadded.

    Parameters
    ----------
    push
        Takes a host tensor to the device.
    """
    shape = exact_shape(segments, max_blocks)
    return shape.parts(push(numbers_of(segments, shape, block_size)))


def entry_of(row: Row) -> Entry:
    """Return the entry of a row into its slot: its last token is the first to be fed."""
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
