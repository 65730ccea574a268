"""Blocks of the key-value cache: who holds which, counted, so that prompts can be shared.

The cache is an array of blocks of `block_size` positions. A row holds the blocks of its sequence in
order; the members of a group hold the full blocks of their prompt together. A block is free again
when its last holder lets it go.

Easy to get wrong: a graph always runs its full width, so rows that hold nothing must still be able
to write somewhere: block 0 is never handed out and takes what nobody reads. Letting go of a block
twice gives it to two rows, which no shape check shows; here it raises.
"""

from __future__ import annotations

from collections.abc import Iterable

SCRAP = 0


class OutOfBlocksError(Exception):
    """Fewer blocks are free than were asked for."""


class BlockPool:
    """Counts the holders of each block of `block_size` positions.

    The `count` of the cache's blocks includes the scrap block.
    """

    def __init__(self, count: int, block_size: int) -> None:
        if count < 2:
            raise ValueError(f"the cache has {count} blocks; it needs 2 or more (one is scrap)")
        self.block_size = block_size
        self.count = count
        self._free = list(range(count - 1, SCRAP, -1))
        self._holders = [0] * count

    @property
    def capacity(self) -> int:
        """Blocks that can be held."""
        return self.count - 1

    @property
    def free(self) -> int:
        """Blocks that are free."""
        return len(self._free)

    def blocks_for(self, positions: int) -> int:
        """Return the number of blocks that `positions` need."""
        return -(-positions // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks to one holder.

        Raises `OutOfBlocksError` when fewer are free; nothing is handed out then.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked for; {len(self._free)} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            if self._holders[block] == 0:
                raise ValueError(f"block {block} is free; only a held block can be shared")
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take a holder from each block; free those without one."""
        for block in blocks:
            if self._holders[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)
