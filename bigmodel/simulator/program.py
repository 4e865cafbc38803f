"""A Program: what one rank does in one optimizer step, as tasks on streams.

[Note: Memory follows the order of issue]
Tasks are listed in the order in which the host issues them, and memory is allocated and
freed in that order: torch's allocators serve the host, whenever the device gets to the
work. Time is different: a stream runs its tasks one after another, and a task waits for
those it names. Live bytes therefore do not depend on seconds.

[Note: Sums and single tensors]
Live bytes are counted in sums: what a task changes, and its worst moment. What the
allocator makes of them depends on single tensors in order, so a task can say which they
are (`tensors`); nobody looks at them unless the allocator is replayed (`replay.py`).
Where it does not, every entry of its sums is one tensor. What goes is named by size
alone, as in a tape.

[Note: Whose turn it is]
A task belongs to the unit in whose turn it was written: while the unit's forward or
backward is, with what the library does before and after it. One that is for another
unit, such as a gather ahead of its use, says so itself. Only who explains a peak looks
at it (`unit_holdings.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Stream = Literal["compute", "communication", "pipeline", "host"]

Holdings = tuple[tuple[str, int], ...]
"""Bytes by who holds them; negative where they are let go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work, and what it does to memory."""

    label: str
    stream: Stream = "compute"
    seconds: float = 0.0
    after: tuple[int, ...] = ()
    """Tasks of this program that must have ended before."""
    change: Holdings = ()
    """What is live after the task and was not before."""
    surge: Holdings = ()
    """What is live beyond the start of the task at its worst moment."""
    tensors: Holdings = ()
    """The single tensors that come, and go where negative, in order: their sum is
    `change`, their worst moment that of `surge`. Empty: one for each entry of these.
    See [Note: Sums and single tensors]."""
    pool: str = "compute"
    """The stream that is current when they come: the allocator has a pool for each."""
    unit: str | None = None
    """What reports call the unit that it is for; None: the one whose turn it is, see
    [Note: Whose turn it is]."""
    first: Holdings = ()
    """Tensors of the program's base that come when this task begins for the first time:
    an optimizer's states."""
    sends: str | None = None
    """Name of the message that is ready when the task ends."""
    receives: str | None = None
    """Name of the message that must have been sent before the task can start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A unit of a program's rank, with what it has parts of in the base."""

    name: str
    """What reports call it."""
    elements: int
    """Number of parameters that the rank holds for it, before any sharding."""
    trainable_elements: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The tasks of one rank, in the order of issue."""

    tasks: tuple[Task, ...]
    base: Holdings = field(default=())
    """What is live before the step and after it."""
    layout: Holdings = field(default=())
    """The single tensors of the base in the order in which they are made, but for those
    that a task makes at first."""
    turns: tuple[str, ...] = ()
    """For every task the unit that it belongs to; empty for what is of no unit."""
    members: tuple[Member, ...] = ()
    """Units of the rank in forward order."""
    ranks: tuple[int, ...] = ()
    """Ranks that run it; empty: all of the pipeline stage with the program's index."""
    host: Holdings = ()
    """What the rank keeps in its machine's memory, which is not the device's."""
    disk: Holdings = ()
    """What the rank keeps on a disk of its machine."""


def merge(*holdings: Holdings) -> Holdings:
    """Add holdings by holder, leaving out what cancels."""
    sums: dict[str, int] = {}
    for holding in holdings:
        for kind, count in holding:
            sums[kind] = sums.get(kind, 0) + count
    return tuple((kind, count) for kind, count in sums.items() if count)


def single(kind: str, sizes: Iterable[int]) -> Holdings:
    """Return an entry for every tensor; sizes are negative where they go."""
    return tuple((kind, size) for size in sizes if size)


def total(holdings: Holdings) -> int:
    """Return the bytes of all holders."""
    # A loop: this is the innermost function of every simulation.
    live = 0
    for _, count in holdings:
        live += count
    return live


class ProgramBuilder:
    """Writes a program task by task, for all ranks of a stage or for those named."""

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self._ranks = ranks
        self.turn = ""
        """The unit whose turn it is; empty between units."""
        self._tasks: list[Task] = []
        self._turns: list[str] = []
        self._members: list[Member] = []
        self._base: list[tuple[str, int]] = []
        self._layout: list[tuple[str, int]] = []
        self._host: list[tuple[str, int]] = []
        self._disk: list[tuple[str, int]] = []

    def hold(
        self, kind: str, num_bytes: float, sizes: Iterable[int] | None = None
    ) -> None:
        """Note what is live through the whole step.

        Args:
            kind: Who holds it.
            num_bytes: How much.
            sizes: Bytes of the single tensors; None: it is one, and none where a task
                makes them (`Task.first`).
        """
        self._base.append((kind, int(num_bytes)))
        self._layout += single(kind, (int(num_bytes),) if sizes is None else sizes)

    def hold_on_host(self, kind: str, num_bytes: float) -> None:
        """Note what lies in the machine's memory through the whole step."""
        self._host.append((kind, int(num_bytes)))

    def hold_on_disk(self, kind: str, num_bytes: float) -> None:
        """Note what lies on the machine's disk through the whole step."""
        self._disk.append((kind, int(num_bytes)))

    def join(self, member: Member) -> None:
        """Note a unit of the rank; in forward order."""
        self._members.append(member)

    def add(self, task: Task) -> int:
        """Append a task and return its index."""
        self._tasks.append(task)
        self._turns.append(self.turn if task.unit is None else task.unit)
        return len(self._tasks) - 1

    def allocate(
        self,
        kind: str,
        num_bytes: float,
        label: str,
        sizes: Sequence[int] = (),
        pool: str = "compute",
        unit: str | None = None,
    ) -> int:
        """Append a task that only allocates, or frees where bytes are negative.

        Args:
            kind: Who holds it.
            num_bytes: How much.
            label: For reports.
            sizes: Bytes of the single tensors, signed alike; empty: it is one.
            pool: The stream that is current.
            unit: As for `Task`.
        """
        return self.add(
            Task(
                label=label,
                change=((kind, int(num_bytes)),),
                tensors=single(kind, sizes) if sizes else (),
                pool=pool,
                unit=unit,
            )
        )

    @property
    def last(self) -> int:
        """Index of the task that was added last."""
        return len(self._tasks) - 1

    def build(self) -> Program:
        """Return the program."""
        return Program(
            tasks=tuple(self._tasks),
            base=merge(tuple(self._base)),
            layout=tuple(self._layout),
            turns=tuple(self._turns),
            members=tuple(self._members),
            ranks=self._ranks,
            host=merge(tuple(self._host)),
            disk=merge(tuple(self._disk)),
        )
