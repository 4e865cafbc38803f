"""Segments that grow page by page, under `expandable_segments:True`.

Source: torch 2.13, `c10/cuda/CUDACachingAllocator.cpp`: [Note: Expandable Segments],
`find_expandable_block`, `map_block`, `try_allocate_expandable_block`, `unmap_block`.
Pages are of 2 MiB in a small pool and of 20 MiB in a large one. Memory is mapped at the
lowest addresses that have room, free blocks before them counted; what is freed stays
mapped until the cache is emptied, and then only pages that are free as a whole go.
"""

from __future__ import annotations

from bigmodel.simulator.memory_blocks import Block, Pool, split

ADDRESS_SPACE = 1 << 50
"""Bytes of addresses of a segment, more than any pool maps. torch takes 9/8 of the
device's memory, and begins another segment when these are used up."""


def map_more(
    pool: Pool, size: int, page: int, room: int | None
) -> tuple[Block | None, int]:
    """Make a block by mapping pages.

    Args:
        pool: It has unmapped addresses.
        size: Bytes that the block needs.
        page: Bytes of a page.
        room: Bytes that may be mapped; None: any.

    Returns:
        The block, no longer in the pool, or None if there is not enough room; and the
        bytes that were mapped, which can be some even then.
    """
    block, total = _lowest(pool, size), 0
    while not block.mapped or block.size < size:
        empty = block.after if block.mapped else block
        if empty is None:
            raise ValueError("no addresses are left in the segment")
        missing = size - block.size if block.mapped else size
        grown = -(-min(missing, empty.size) // page) * page
        if room is not None and total + grown > room:
            return None, total
        total += grown
        block = _map(pool, empty, grown)
    pool.remove(block)
    return block, total


def unmap_pages(block: Block, page: int) -> int:
    """Unmap the pages that a free block covers; return their bytes."""
    pool = block.pool
    begin, end = block.start - pool.origin, block.start + block.size - pool.origin
    begin = pool.origin - (-begin // page) * page
    end = pool.origin + end // page * page
    if begin >= end:
        return 0
    pool.remove(block)
    if begin > block.start:
        rest = split(block, begin - block.start)
        pool.insert(block)
        block = rest
    if block.start + block.size > end:
        pool.insert(split(block, end - block.start))
    block.mapped = False
    pool.merge(block)
    pool.insert(block)
    return end - begin


def _lowest(pool: Pool, size: int) -> Block:
    """Return the first block of the lowest addresses with so much room."""
    for empty in pool.unmapped_blocks():
        first = empty
        if empty.before is not None and not empty.before.used:
            first = empty.before
        free, block = 0, first
        while block is not None and not block.used and free < size:
            free += block.size
            block = block.after
        if free >= size:
            return first
    raise ValueError("no addresses are left in the segment")


def _map(pool: Pool, empty: Block, size: int) -> Block:
    pool.remove(empty)
    if size < empty.size:
        pool.insert(split(empty, size))
    empty.mapped = True
    pool.merge(empty)
    pool.insert(empty)
    return empty
