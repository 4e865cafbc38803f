"""From a tape to segments: what a unit does between two moments that others see.

Inside a unit's phase nothing but its own operators touches memory until the gradient of
a parameter is complete. All events up to there fold into one segment that knows its
seconds, its net change, and its worst moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bigmodel.clusters import Device
from bigmodel.models import Event, Gradient, Op, Param, Storage, Tape
from bigmodel.simulator.program import Holdings, total
from bigmodel.simulator.roofline import op_seconds

HOLDER = {
    "activation": "activations",
    "boundary": "activations",
    "temporary": "temporaries",
    "gradient": "gradients",
    "partial": "temporaries",
    "cast": "weights in autocast's precision",
}
"""Who holds a storage of each kind, as reports name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Events that nobody interrupts."""

    seconds: float
    change: Holdings
    surge: Holdings
    tensors: Holdings = ()
    """Every tensor that comes or goes, in order; see `program.Task`."""
    gradients: tuple[Gradient, ...] = ()
    """Complete at the end of the segment."""


def cut(tape: Tape, micro_batch: int, device: Device) -> tuple[Segment, ...]:
    """Return the segments of a tape, each but the last ended by a gradient."""
    segments: list[Segment] = []
    pending: list[Storage | Op] = []
    for event in tape.events:
        if isinstance(event, Gradient):
            segments.append(_fold(pending, micro_batch, device, (event,)))
            pending = []
        else:
            pending.append(event)
    if pending or not segments:
        segments.append(_fold(pending, micro_batch, device, ()))
    return tuple(segments)


def join(segments: Iterable[Segment]) -> Segment:
    """Return one segment for several that nobody looks between."""
    seconds, level, worst = 0.0, {}, {}
    gradients: tuple[Gradient, ...] = ()
    tensors: Holdings = ()
    highest = 0
    for segment in segments:
        base = sum(level.values())
        if base + total(segment.surge) > highest:
            highest = base + total(segment.surge)
            worst = _plus(level, segment.surge)
        level = _plus(level, segment.change)
        seconds += segment.seconds
        gradients += segment.gradients
        tensors += segment.tensors
    return Segment(
        seconds=seconds,
        change=_holdings(level),
        surge=_holdings(worst),
        tensors=tensors,
        gradients=gradients,
    )


def without_free(tape: Tape, micro_batch: int, num_bytes: int) -> tuple[Tape, bool]:
    """Return a tape that does not free a boundary of this size, and whether it did.

    The first unit of a later pipeline stage reads its input from a receive buffer, and
    the last unit of an earlier one the gradient of its output; the buffers stay.
    """
    for index, event in enumerate(tape.events):
        if (
            isinstance(event, Storage)
            and event.sign < 0
            and event.kind == "boundary"
            and event.size.at(micro_batch) == num_bytes
        ):
            return Tape(tape.events[:index] + tape.events[index + 1 :]), True
    return tape, False


def ends_on_rank(tape: Tape, beside: frozenset[int], *, at_end: bool) -> Tape:
    """Return a tape with one end for each storage that a far unit frees.

    Args:
        tape: Of a phase, or of what its end frees.
        beside: Numbers of the units of the rank.
        at_end: Whether it is the latter.
    """
    kept = tuple(
        event
        for event in tape.events
        if not isinstance(event, Storage)
        or event.partner is None
        or (event.partner in beside) != at_end
    )
    return tape if len(kept) == len(tape.events) else Tape(kept)


def with_own_gradients(tape: Tape, params: Iterable[Param], *, at_end: bool) -> Tape:
    """Return a tape of a rank that has one use of these tied weights.

    What waits in the whole model for the gradient of the other use is the gradient
    itself here, complete once its operator's node has let go of what it was given.

    Args:
        tape: Of a backward, or of what its end frees.
        params: The tied weights.
        at_end: Whether it is the latter.
    """
    events = list(tape.events)
    for param in params:
        found = next((i for i, e in enumerate(events) if _is_part_of(e, param)), None)
        if found is None:
            continue
        part = events.pop(found)
        if at_end or not isinstance(part, Storage):
            continue
        events.insert(found, replace(part, kind="gradient"))
        later = range(found + 1, len(events))
        freed = next((i for i in later if _is_free(events[i])), found)
        end = next(
            (i for i in later if i > freed and not _is_free(events[i])), len(events)
        )
        events.insert(end, Gradient(param.name, param.elements))
    return Tape(tuple(events))


def _is_part_of(event: Event, param: Param) -> bool:
    if not isinstance(event, Storage) or event.kind != "partial":
        return False
    return not event.size.per_sample and event.size.fixed in (
        2 * param.elements,
        4 * param.elements,
    )


def _is_free(event: Event) -> bool:
    return isinstance(event, Storage) and event.sign < 0


def _fold(
    events: Iterable[Storage | Op],
    micro_batch: int,
    device: Device,
    gradients: tuple[Gradient, ...],
) -> Segment:
    seconds = 0.0
    level: dict[str, int] = {}
    live = highest = 0
    worst: dict[str, int] = {}
    tensors: list[tuple[str, int]] = []
    for event in events:
        if isinstance(event, Op):
            seconds += op_seconds(event, micro_batch, device)
            continue
        count = event.sign * event.size.at(micro_batch)
        holder = HOLDER[event.kind]
        tensors.append((holder, count))
        level[holder] = level.get(holder, 0) + count
        live += count
        if live > highest:
            highest, worst = live, dict(level)
    return Segment(
        seconds=seconds,
        change=_holdings(level),
        surge=_holdings(worst),
        tensors=tuple(tensors),
        gradients=gradients,
    )


def _plus(level: dict[str, int], holdings: Holdings) -> dict[str, int]:
    result = dict(level)
    for kind, count in holdings:
        result[kind] = result.get(kind, 0) + count
    return result


def _holdings(level: dict[str, int]) -> Holdings:
    return tuple((kind, count) for kind, count in level.items() if count)
