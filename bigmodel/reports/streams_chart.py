"""Streams of one step as lanes of boxes, one lane for every stream and stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigmodel.simulator import Timeline
from bigmodel.simulator.timeline import Span

_WIDTH = 1000.0
_BOXES = 700
"""Boxes in the whole chart; neighbours are joined where there are more."""


@dataclass(frozen=True, slots=True)
class Box:
    """What ran, on a field 1000 wide."""

    label: str
    left: float
    width: float
    seconds: float
    backward: bool
    """Whether it belongs to the backward, which has a colour of its own."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream of one stage."""

    name: str
    boxes: tuple[Box, ...]


def draw_streams(timelines: Sequence[Timeline]) -> tuple[Lane, ...]:
    """Return the lanes of the stages of one step, on a common scale of time."""
    end = max((timeline.seconds for timeline in timelines), default=0.0)
    if not end:
        return ()
    streams: list[tuple[str, list[Span]]] = []
    for stage, timeline in enumerate(timelines):
        by_stream: dict[str, list[Span]] = {}
        for span in timeline.spans:
            if span.end > span.start:
                by_stream.setdefault(span.stream, []).append(span)
        prefix = f"stage {stage} " if len(timelines) > 1 else ""
        streams += [(prefix + name, spans) for name, spans in by_stream.items()]
    budget = max(_BOXES // max(len(streams), 1), 8)
    return tuple(Lane(name, _boxes(spans, end, budget)) for name, spans in streams)


def _boxes(spans: Sequence[Span], end: float, budget: int) -> tuple[Box, ...]:
    """Join what lies close together, until few enough boxes are left."""
    ordered = sorted(spans, key=lambda span: span.start)
    gap = end / (2 * _WIDTH)
    groups = _close_together(ordered, gap)
    while len(groups) > budget and gap < end:
        gap *= 2
        groups = _close_together(ordered, gap)
    return tuple(_box(group, end) for group in groups)


def _close_together(spans: Sequence[Span], gap: float) -> list[list[Span]]:
    """Return groups of short spans of one phase with no wider gap between them."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups:
            first, last = groups[-1][0], groups[-1][-1]
            close = span.start - last.end <= gap and span.end - first.start <= 20 * gap
            if close and _is_backward(span) == _is_backward(first):
                groups[-1].append(span)
                continue
        groups.append([span])
    return groups


def _box(group: Sequence[Span], end: float) -> Box:
    label = group[0].label
    if len(group) > 1 and group[-1].label != label:
        label += f" to {group[-1].label}"
    start, stop = group[0].start, max(span.end for span in group)
    return Box(
        label=label,
        left=_WIDTH * start / end,
        width=max(_WIDTH * (stop - start) / end, 0.3),
        seconds=stop - start,
        backward=_is_backward(group[0]),
    )


def _is_backward(span: Span) -> bool:
    return "backward" in span.label
