"""Blocks of device memory, and the free ones of a pool in the order of best fit.

Source: torch 2.13, `c10/cuda/CUDACachingAllocator.cpp`: `Block`, `BlockPool`,
`BlockComparatorSize`, `try_merge_blocks`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import final


@final
class Block:
    """A range of addresses of one segment, in use or free."""

    __slots__ = ("after", "before", "mapped", "pool", "size", "start", "used")

    def __init__(self, pool: Pool, start: int, size: int) -> None:
        self.pool = pool
        self.start = start
        """Its address."""
        self.size = size
        """Bytes."""
        self.used = False
        self.mapped = True
        """Whether memory lies behind the addresses; those of an expandable segment can
        be empty."""
        self.before: Block | None = None
        """Its neighbour in the segment."""
        self.after: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


@final
class Pool:
    """The blocks that one stream shares, either small ones or large ones.

    Args:
        small: Whether it is for allocations of at most 1 MiB.
        expandable: Whether its memory is one segment that grows.
    """

    def __init__(self, *, small: bool, expandable: bool = False) -> None:
        self.small = small
        self.expandable = expandable
        self.num_segments = 0
        """Segments that were taken from the device, expandable ones not counted."""
        self.origin = 0
        """First address of an expandable segment."""
        self._free: list[tuple[int, int]] = []
        """Size and address of the free blocks that have memory, in order."""
        self._at: dict[int, Block] = {}
        self._unmapped: list[int] = []
        """Addresses of the blocks of expandable segments that have no memory."""

    def free_blocks(self) -> list[Block]:
        """Return the free blocks that have memory, smallest first."""
        return [self._at[start] for _, start in self._free]

    def unmapped_blocks(self) -> list[Block]:
        """Return the blocks without memory, lowest address first."""
        return [self._at[start] for start in self._unmapped]

    @property
    def largest(self) -> int:
        """Bytes of the largest free block."""
        return self._free[-1][0] if self._free else 0

    def fitting(self, size: int) -> Iterator[Block]:
        """Yield the free blocks that are large enough, best fit first."""
        first = bisect_left(self._free, (size, -1))
        for index in range(first, len(self._free)):
            yield self._at[self._free[index][1]]

    def best_fit(self, size: int) -> Block | None:
        """Return the smallest free block that suffices, at the lowest address."""
        index = bisect_left(self._free, (size, -1))
        return self._at[self._free[index][1]] if index < len(self._free) else None

    def insert(self, block: Block) -> None:
        """Note a block that is free, or has no memory."""
        if block.mapped:
            insort(self._free, (block.size, block.start))
        else:
            insort(self._unmapped, block.start)
        self._at[block.start] = block

    def remove(self, block: Block) -> None:
        """Forget a block that was noted."""
        if block.mapped:
            del self._free[bisect_left(self._free, (block.size, block.start))]
        else:
            del self._unmapped[bisect_left(self._unmapped, block.start)]
        del self._at[block.start]

    def merge(self, block: Block) -> None:
        """Let a block that is not noted take in its neighbours of the same state."""
        before, after = block.before, block.after
        if before is not None and not before.used and before.mapped == block.mapped:
            self.remove(before)
            block.start = before.start
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.used and after.mapped == block.mapped:
            self.remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block


def split(block: Block, size: int) -> Block:
    """Cut a block behind its first bytes and return the rest, not noted anywhere."""
    rest = Block(block.pool, block.start + size, block.size - size)
    rest.mapped = block.mapped
    rest.before, rest.after = block, block.after
    if rest.after is not None:
        rest.after.before = rest
    block.after = rest
    block.size = size
    return rest
