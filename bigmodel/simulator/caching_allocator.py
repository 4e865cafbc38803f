"""torch's caching allocator of CUDA memory: what a run of allocations makes it reserve.

Source: torch 2.13, `c10/cuda/CUDACachingAllocator.cpp` (`malloc`, `get_free_block`,
`alloc_block`, `should_split`, `free_block`, `release_cached_blocks`) and
`c10/core/AllocatorConfig.h`. Nothing here is measured: these are its rules.

    size       rounded up to 512 B, or to a fraction of a power of two if so asked
    pool       one for every stream and size: small ones take at most 1 MiB
    found      the smallest free block of the pool that is large enough
    not found  a segment from the device: of 2 MiB for a small one, of 20 MiB below
               10 MiB, else of the size rounded up to 2 MiB
    split      what is left of a block stays free: in a small pool from 512 B on, in a
               large one if it is more than 1 MiB, else it is wasted with the block
    freed      merged with its free neighbours of the same segment, and cached
    full       segments that are free as a whole go back to the device, and once more

With `expandable_segments` a pool is one range of addresses, which grows page by page
(`expandable_segments.py`); nothing is wasted in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from bigmodel.errors import BigModelError
from bigmodel.simulator.expandable_segments import ADDRESS_SPACE, map_more, unmap_pages
from bigmodel.simulator.memory_blocks import Block, Pool, split
from bigmodel.units import MIB, format_bytes

MIN_BLOCK = 512
"""`kMinBlockSize`."""
SMALL = MIB
"""`kSmallSize`: the largest allocation that is small."""
SMALL_SEGMENT = 2 * MIB
"""`kSmallBuffer`."""
MIN_LARGE = 10 * MIB
"""`kMinLargeAlloc`: allocations from here on have segments of their own size."""
ROUND_LARGE = 2 * MIB
"""`kRoundLarge`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What `PYTORCH_ALLOC_CONF` says; the defaults are torch's."""

    expandable_segments: bool = False
    large_segment: int = 20 * MIB
    """Bytes of a segment for allocations between 1 and 10 MiB, and of a page of an
    expandable segment of large blocks."""
    max_split: int | None = None
    """Bytes of a block from which on it is neither split nor given to a smaller
    request; None: all blocks are split."""
    max_non_split_rounding: int = 20 * MIB
    """Bytes by which a block of `max_split` or more may be larger than the request."""
    roundup_power2_divisions: int = 0
    """Parts of the range between two powers of two to which sizes are rounded up; 0:
    they are rounded to 512 B. One number for all sizes."""


DEFAULT = AllocatorSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorState:
    """What the allocator counts, in bytes."""

    allocated: int
    """`torch.cuda.memory_allocated`: of blocks in use."""
    reserved: int
    """`torch.cuda.memory_reserved`: of segments."""
    peak_allocated: int
    peak_reserved: int
    segments: int
    """How many segments it has; torch does not count expandable ones."""
    largest_hole: int
    """Bytes of the largest free block."""


class AllocatorFullError(BigModelError):
    """The device has no room for a segment, though all that is cached was released."""

    def __init__(self, asked: int, limit: int, allocated: int, reserved: int) -> None:
        self.asked = asked
        """Bytes of the segment."""
        self.allocated = allocated
        self.reserved = reserved
        super().__init__(
            f"CUDA out of memory. Tried to allocate {format_bytes(asked)}. Of "
            f"{format_bytes(limit)} that the allocator may reserve, "
            f"{format_bytes(allocated)} is allocated and "
            f"{format_bytes(reserved - allocated)} is reserved but unallocated."
        )


@final
class CachingAllocator:
    """Serves allocations as torch's allocator does, on addresses that it makes up.

    Args:
        settings: Those of the process.
        limit: Bytes that it may reserve; None: as many as it likes.
    """

    def __init__(
        self, settings: AllocatorSettings = DEFAULT, *, limit: int | None = None
    ) -> None:
        self._settings = settings
        self._limit = limit
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._next_address = 0
        self._allocated = self._reserved = 0
        self._peak_allocated = self._peak_reserved = 0
        self.retries = 0
        """How often segments were released to make room, `num_alloc_retries`."""

    @property
    def state(self) -> AllocatorState:
        """What it counts now."""
        pools = self._pools.values()
        return AllocatorState(
            allocated=self._allocated,
            reserved=self._reserved,
            peak_allocated=self._peak_allocated,
            peak_reserved=self._peak_reserved,
            segments=sum(pool.num_segments for pool in pools),
            largest_hole=max((pool.largest for pool in pools), default=0),
        )

    def reset_peaks(self) -> None:
        """Begin to look for peaks anew, as `reset_peak_memory_stats` does."""
        self._peak_allocated = self._allocated
        self._peak_reserved = self._reserved

    def allocate(self, num_bytes: int, stream: str = "compute") -> Block:
        """Return a block for a tensor.

        Args:
            num_bytes: What the tensor needs, at least 1.
            stream: The one that is current.

        Raises:
            AllocatorFullError: The limit leaves no room for it.
        """
        size = rounded(num_bytes, self._settings)
        small = size <= SMALL
        pool = self._pools.get((stream, small)) or self._pool(stream, small=small)
        block = self._cached(pool, size)
        if block is None:
            block = self._from_device(pool, size)
        if block.size > size and self._is_split(pool, block.size, size):
            pool.insert(split(block, size))
        block.used = True
        self._allocated += block.size
        if self._allocated > self._peak_allocated:
            self._peak_allocated = self._allocated
        return block

    def free(self, block: Block) -> None:
        """Take a block back into its pool."""
        block.used = False
        self._allocated -= block.size
        block.pool.merge(block)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Give back what is not in use, as `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            for block in pool.free_blocks():
                if pool.expandable:
                    self._reserved -= unmap_pages(block, self._page(pool))
                elif block.whole:
                    self._release(block)

    def _pool(self, stream: str, *, small: bool) -> Pool:
        key = (stream, small)
        if key not in self._pools:
            self._pools[key] = Pool(
                small=small, expandable=self._settings.expandable_segments
            )
        return self._pools[key]

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.small else self._settings.large_segment

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """Take the best fit out of the pool."""
        block = pool.best_fit(size)
        if block is None:
            return None
        if pool.expandable:
            block = _least_expandable(pool.fitting(size))
        most = self._settings.max_split
        if most is not None:
            if size < most <= block.size:
                return None
            slack = self._settings.max_non_split_rounding
            if size >= most and block.size >= size + slack:
                return None
        pool.remove(block)
        return block

    def _from_device(self, pool: Pool, size: int) -> Block:
        """Take memory from the device, if need be after releasing what is cached."""
        asked = segment_size(size, self._settings)
        block = self._new(pool, size, asked)
        if block is None and self._release_oversize(pool, size):
            block = self._new(pool, size, asked)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new(pool, size, asked)
        if block is None:
            raise AllocatorFullError(
                asked, self._limit or 0, self._allocated, self._reserved
            )
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        return block

    def _new(self, pool: Pool, size: int, asked: int) -> Block | None:
        if pool.expandable:
            if not pool.unmapped_blocks():
                pool.origin = self._addresses(ADDRESS_SPACE)
                empty = Block(pool, pool.origin, ADDRESS_SPACE)
                empty.mapped = False
                pool.insert(empty)
            room = None if self._limit is None else self._limit - self._reserved
            block, mapped = map_more(pool, size, self._page(pool), room)
            self._reserved += mapped
            return block
        if self._limit is not None and self._reserved + asked > self._limit:
            return None
        self._reserved += asked
        pool.num_segments += 1
        return Block(pool, self._addresses(asked), asked)

    def _addresses(self, size: int) -> int:
        start = self._next_address
        self._next_address += size
        return start

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        block.pool.num_segments -= 1
        self._reserved -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release cached blocks of `max_split` or more, until there is enough."""
        most = self._settings.max_split
        if most is None or pool.expandable:
            return False
        wanted = max(size, most)
        fitting = pool.best_fit(wanted)
        if fitting is not None:
            self._release(fitting)
            return True
        released = 0
        for block in reversed(pool.free_blocks()):
            if block.size < most or released >= wanted:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def _is_split(self, pool: Pool, held: int, size: int) -> bool:
        if pool.small or pool.expandable:
            return held - size >= MIN_BLOCK
        most = self._settings.max_split
        return held - size > SMALL and (most is None or size < most)


def rounded(num_bytes: int, settings: AllocatorSettings = DEFAULT) -> int:
    """Return the bytes of the block for so many (`round_size`)."""
    divisions = settings.roundup_power2_divisions
    if divisions > 1 and num_bytes > MIN_BLOCK * divisions:
        return _up_to_division(num_bytes, divisions)
    return max(-(-num_bytes // MIN_BLOCK), 1) * MIN_BLOCK


def segment_size(size: int, settings: AllocatorSettings = DEFAULT) -> int:
    """Return the bytes of a new segment for a rounded size (`get_allocation_size`)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return settings.large_segment
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def _up_to_division(size: int, divisions: int) -> int:
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return -(-size // step) * step if step else floor << 1


def _least_expandable(blocks: Iterator[Block]) -> Block:
    """Return the best fit of an expandable segment.

    A block at the end of what is mapped counts with the addresses behind it, so that
    holes are filled first.
    """

    def reach(block: Block) -> int:
        after = block.after
        more = after.size if after is not None and not after.mapped else 0
        return block.size + more

    best = next(blocks)
    for block in blocks:
        if reach(block) >= reach(best):
            break
        best = block
    return best
