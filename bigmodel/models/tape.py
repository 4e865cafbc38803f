"""The tape of a unit: what one phase allocates, frees and computes, in order.

[Note: Storages across units]
A tape does not name storages. Every allocation and every free carries its size and its
kind, and a storage that is made in one unit's tape and freed in another's (an output, a
saved tensor) is a positive entry here and a negative one there. The sum over all tapes
of a step is zero but for gradients, which stay. Tapes can therefore be replayed for any
number of equal blocks, and their live bytes still add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bigmodel.models.size import Size

Kind = Literal["activation", "boundary", "temporary", "gradient", "partial", "cast"]
"""What a storage is for.

`activation`: lives from forward to backward; `boundary`: handed from one unit to the
next, or its gradient; `temporary`: lives within one phase of one unit; `gradient`: of a
parameter; `partial`: of one use of a parameter, until that of another one is added;
`cast`: a copy of a weight in the precision of autocast."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage appears (`sign` 1) or disappears (`sign` -1)."""

    sign: int
    size: Size
    kind: Kind
    partner: int | None = None
    """The other unit of a storage that one unit makes and another one frees, which is
    not next to it. Both tapes have the end, the first one in what goes when the phase
    of all units ends: which of them counts, depends on whether the rank has both."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter is complete and passes to whoever reduces it.

    Its storage was announced before by a `Storage` of kind `gradient`; whoever takes
    the gradient decides when that storage goes.
    """

    param: str
    """Name of the parameter, relative to its unit."""
    elements: int


@dataclass(frozen=True, slots=True)
class Op:
    """An operator ran."""

    kind: Literal["matmul", "attention", "memory"]
    """Which law its time obeys."""
    flops: Size
    bytes_moved: Size
    """Bytes read and written, inputs and outputs once each."""
    dtype: str
    """Element type of the largest operand, for the device's peak."""


Event = Storage | Gradient | Op


@dataclass(frozen=True, slots=True)
class Tape:
    """The events of one phase of one unit, in the order in which they happen."""

    events: tuple[Event, ...] = ()

    def flops(self, micro_batch: int) -> int:
        """Return the FLOP of all operators."""
        return sum(e.flops.at(micro_batch) for e in self.events if isinstance(e, Op))

    def net(self, micro_batch: int, kind: Kind | None = None) -> int:
        """Return the bytes that are live at the end and were not at the beginning."""
        return sum(
            event.sign * event.size.at(micro_batch)
            for event in self.events
            if isinstance(event, Storage) and kind in (None, event.kind)
        )
