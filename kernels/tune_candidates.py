"""What `kernels.tune` tries: shapes of the kernels for a layer alone, and for one with an adapter.

Shapes that read best without an adapter are not the best with one: z needs warps, and its words
registers. So the two have lists of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.fused_adapter import Join, Joining
from kernels.hopper import Choice
from kernels.packing import PACK_COLUMNS

# warps, resident, prefetch
_EIGHT = (
    (14, 2, False), (10, 3, False), (10, 4, False), (5, 6, False), (8, 4, False), (4, 8, False),
    (7, 0, True), (5, 0, True),
)  # fmt: skip
# warps, row tiles, ahead, resident, prefetch
_SIXTEEN = (
    (14, 1, 4, 2, False), (14, 1, 0, 2, False), (8, 1, 4, 0, False), (10, 1, 0, 3, False),
    (14, 2, 0, 0, False), (5, 2, 0, 0, False), (8, 2, 0, 0, False), (4, 2, 0, 0, False),
    (5, 1, 0, 0, True), (8, 1, 0, 4, False),
)  # fmt: skip


def alone(N: int, K: int, M: int, processors: int) -> Iterator[Choice]:
    """Yield what is worth trying for y (M, N) = x (M, K) W^T on so many multiprocessors."""
    if M <= 32:
        for warps in (4, 5, 7, 8, 10, 14):
            for row_tiles in (1,) if M <= 8 or M > 16 else (1, 2):
                for ahead in (0, 1, 2, 4) if M <= 16 else (0, 1):
                    for prefetch in (False, True) if row_tiles == 1 else (False,):
                        yield Choice(
                            path="narrow", warps=warps, row_tiles=row_tiles, ahead=ahead,
                            prefetch=prefetch,
                        )  # fmt: skip
        # More warps at once by fewer registers each.
        for warps in (4, 5, 7, 8, 10, 14) if M <= 16 else ():
            for resident_warps in (32, 40, 48):
                for ahead in (0, 1):
                    yield Choice(
                        path="narrow", warps=warps, ahead=ahead, resident=resident_warps // warps
                    )
        for warps in (4, 5, 7, 8) if 8 < M <= 16 else ():
            for ahead in (0, 1):
                yield Choice(
                    path="narrow", warps=warps, row_tiles=2, ahead=ahead, resident=20 // warps
                )
    if M >= 16:
        yield from _wide_candidates(N, K, M, processors)
    if M >= 128:
        yield Choice(path="dense")


def _wide_candidates(N: int, K: int, M: int, processors: int) -> Iterator[Choice]:
    packs = -(-K // PACK_COLUMNS)
    for tokens in (32, 64, 128, 256):
        if tokens < min(M, 128) or tokens > max(32, 2 * M):
            continue
        for consumers, row_tiles in ((2, 1), (2, 2), (3, 1), (3, 2)):
            registers = tokens * row_tiles
            if registers > 256 or (consumers == 3 and registers > 128):
                continue
            shape = Choice(path="wide", consumers=consumers, row_tiles=row_tiles, tokens=tokens)
            yield shape
            if M <= 512:
                yield dataclasses.replace(shape, whole=False)
            tiles = -(-N // (consumers * row_tiles * 64)) * -(-M // tokens)
            for cluster in range(2, min(8, packs) + 1):
                waves = tiles * cluster / processors
                if waves <= 1 or (waves <= 3 and waves % 1 >= 0.75):
                    yield dataclasses.replace(shape, cluster=cluster)


def with_adapter(M: int) -> Iterator[tuple[Choice, Joining]]:
    """Yield what is worth trying for M rows, up to 16, and the adapter in the same launch."""
    ways: tuple[tuple[Join, int], ...]
    if M <= 8:
        ways = (("staged", 2), ("staged", 4), ("late", 4), ("extra", 4))
        shapes = [(warps, 1, 0, resident, prefetch) for warps, resident, prefetch in _EIGHT]
    else:
        ways = (("staged", 1), ("staged", 2), ("late", 2))
        shapes = list(_SIXTEEN)
    for warps, row_tiles, ahead, resident, prefetch in shapes:
        choice = Choice(
            path="narrow", warps=warps, row_tiles=row_tiles, ahead=ahead, resident=resident,
            prefetch=prefetch,
        )  # fmt: skip
        for join, parts in ways:
            yield choice, Joining(join=join, parts=parts)
