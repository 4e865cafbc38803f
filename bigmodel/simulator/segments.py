"""From a tape to segments: what a unit does between two moments that others see.

Inside a unit's phase nothing but its own operators touches memory until the gradient of
a parameter is complete. All events up to there fold into one segment that knows its
seconds, its net change, and its worst moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bigmodel.clusters import Device
from bigmodel.models import Gradient, Op, Storage, Tape
from bigmodel.simulator.program import Holdings, total
from bigmodel.simulator.roofline import op_seconds

HOLDER = {
    "activation": "activations",
    "boundary": "activations",
    "temporary": "temporaries",
    "gradient": "gradients",
    "cast": "weights in autocast's precision",
}
"""Who holds a storage of each kind, as reports name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Events that nobody interrupts."""

    seconds: float
    change: Holdings
    surge: Holdings
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
    highest = 0
    for segment in segments:
        base = sum(level.values())
        if base + total(segment.surge) > highest:
            highest = base + total(segment.surge)
            worst = _plus(level, segment.surge)
        level = _plus(level, segment.change)
        seconds += segment.seconds
        gradients += segment.gradients
    return Segment(
        seconds=seconds,
        change=_holdings(level),
        surge=_holdings(worst),
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
    for event in events:
        if isinstance(event, Op):
            seconds += op_seconds(event, micro_batch, device)
            continue
        count = event.sign * event.size.at(micro_batch)
        holder = HOLDER[event.kind]
        level[holder] = level.get(holder, 0) + count
        live += count
        if live > highest:
            highest, worst = live, dict(level)
    return Segment(
        seconds=seconds,
        change=_holdings(level),
        surge=_holdings(worst),
        gradients=gradients,
    )


def _plus(level: dict[str, int], holdings: Holdings) -> dict[str, int]:
    result = dict(level)
    for kind, count in holdings:
        result[kind] = result.get(kind, 0) + count
    return result


def _holdings(level: dict[str, int]) -> Holdings:
    return tuple((kind, count) for kind, count in level.items() if count)
