"""Replaying a program on the caching allocator: what its step makes torch reserve.

The tensors of the base come first, then the workspaces, then step after step. The
optimizer makes its states in the first step, so that the second one finds another
memory. Without a limit reserved bytes never fall: those of the last step are the most
that any of them needs.

A tensor that goes is the newest one of its holder and size, if there is one in the pool
that the task names. Where there is none of that size, a sum of several was meant: the
newest go of which it can be made. One that goes before it comes is not made at all:
sums may be written in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bigmodel.simulator.caching_allocator import (
    DEFAULT,
    MIN_BLOCK,
    AllocatorSettings,
    CachingAllocator,
)
from bigmodel.simulator.memory_blocks import Block
from bigmodel.simulator.program import Program, Task

STEPS = 2
"""Steps that are replayed: one that makes the optimizer's states, one that has them."""
WORKSPACE = "cuBLAS workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the allocator says of a program's last step, in bytes."""

    allocated: int
    """Peak of blocks in use: tensors and workspaces, rounded."""
    reserved: int
    """Peak of segments."""
    segments: int
    """How many there are at the end."""
    largest_hole: int
    """The largest free block when the step has ended."""
    retries: int
    """How often the last step released cached segments to make room; 0 without a
    limit."""
    unmatched: int
    """Bytes that went though no tensors of this sum ever came: 0 where the program is
    right."""


def replay(
    program: Program,
    *,
    workspaces: Sequence[int] = (),
    settings: AllocatorSettings = DEFAULT,
    limit: int | None = None,
    steps: int = STEPS,
) -> Replayed:
    """Return what the steps of a program make the allocator reserve.

    Args:
        program: Of one rank.
        workspaces: Bytes of each tensor that a library keeps from the first forward on.
        settings: Those of the allocator.
        limit: Bytes that it may reserve; None: any.
        steps: How many are replayed.

    Raises:
        AllocatorFullError: The limit leaves no room.
    """
    allocator = CachingAllocator(settings, limit=limit)
    memory = _Memory(allocator)
    memory.apply(program.layout, "compute")
    memory.apply([(WORKSPACE, size) for size in workspaces], "compute")
    retries = 0
    for index in range(steps):
        allocator.reset_peaks()
        retries = allocator.retries
        for task in program.tasks:
            if task.first and not index:
                memory.apply(task.first, "compute")
            if task.change or task.surge:
                memory.apply(tensors_of(task), task.pool)
    state = allocator.state
    return Replayed(
        allocated=state.peak_allocated,
        reserved=state.peak_reserved,
        segments=state.segments,
        largest_hole=state.largest_hole,
        retries=allocator.retries - retries,
        unmatched=memory.unmatched,
    )


def tensors_of(task: Task) -> Iterable[tuple[str, int]]:
    """Return the tensors that come and go in a task, those that go first."""
    if task.tensors:
        return task.tensors
    change = dict(task.change)
    surge = dict(task.surge) if task.surge else change
    rise = sorted(surge.items(), key=lambda entry: entry[1] > 0)
    lasting: list[tuple[str, int]] = []
    passing: list[tuple[str, int]] = []
    for kind, count in rise:
        # What outlives the task and what does not are different tensors.
        kept = min(max(change.get(kind, 0), 0), count) if count > 0 else count
        lasting.append((kind, kept))
        passing.append((kind, count - kept))
    # The rest of what the task changes, once its worst moment is over.
    left = [
        (kind, count - dict(lasting).get(kind, 0)) for kind, count in change.items()
    ]
    ends = [(kind, -count) for kind, count in reversed(passing)]
    return [entry for entry in (*lasting, *passing, *ends, *left) if entry[1]]


class _Memory:
    """Which blocks each holder has."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._held: dict[tuple[str, str], _Held] = {}
        self._owed: dict[tuple[str, int], int] = {}
        """How many tensors of a holder and size went that had not come yet."""
        self._lost = 0

    @property
    def unmatched(self) -> int:
        """Bytes that went and never came."""
        owed = sum(size * count for (_, size), count in self._owed.items())
        return self._lost + owed

    def apply(self, tensors: Iterable[tuple[str, int]], pool: str) -> None:
        """Allocate and free tensors, in order."""
        for kind, count in tensors:
            if count < 0:
                self._free(kind, pool, -count)
            elif count and not (self._owed and self._settles(kind, count)):
                self._of(kind, pool).add(count, self._allocator.allocate(count, pool))

    def _settles(self, kind: str, size: int) -> bool:
        if not self._owed.get((kind, size)):
            return False
        self._owed[kind, size] -= 1
        return True

    def _of(self, kind: str, pool: str) -> _Held:
        key = (kind, pool)
        if key not in self._held:
            self._held[key] = _Held()
        return self._held[key]

    def _free(self, kind: str, pool: str, size: int) -> None:
        named = self._of(kind, pool)
        block = named.take(size)
        if block is not None:
            self._allocator.free(block)
            return
        others = [held for key, held in self._held.items() if key[0] == kind]
        places = [named, *(held for held in others if held is not named)]
        for held in places[1:]:
            block = held.take(size)
            if block is not None:
                self._allocator.free(block)
                return
        chosen: list[tuple[_Held, dict[int, int]]] = []
        left = size
        for held in places:
            found = held.up_to(left)
            chosen.append((held, found))
            left -= sum(found.values())
        if left >= MIN_BLOCK:
            self._owed[kind, size] = self._owed.get((kind, size), 0) + 1
            return
        self._lost += left
        for held, found in chosen:
            for number in found:
                self._allocator.free(held.pop(number))


class _Held:
    """Blocks of one holder in one pool, by size, and the newest last."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, Block]] = {}
        self._of_size: dict[int, list[int]] = {}
        self._next = 0

    def add(self, size: int, block: Block) -> None:
        """Note a block for a tensor of so many bytes."""
        self._blocks[self._next] = (size, block)
        self._of_size.setdefault(size, []).append(self._next)
        self._next += 1

    def take(self, size: int) -> Block | None:
        """Return the newest block of a size and forget it; None if there is none."""
        numbers = self._of_size.get(size)
        if not numbers:
            return None
        return self._blocks.pop(numbers.pop())[1]

    def up_to(self, size: int) -> dict[int, int]:
        """Return the newest blocks whose sum is at most a size, each with its own."""
        chosen: dict[int, int] = {}
        for number in reversed(self._blocks):
            if not size:
                break
            count = self._blocks[number][0]
            if count <= size:
                size -= count
                chosen[number] = count
        return chosen

    def pop(self, number: int) -> Block:
        """Return one of these blocks and forget it."""
        size, block = self._blocks.pop(number)
        self._of_size[size].remove(number)
        return block
