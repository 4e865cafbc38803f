"""Live bytes over one step as a curve, thinned without losing its peaks."""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.simulator import Timeline

_POINTS = 500


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """A polyline on a field of 1000 x 200, origin top left."""

    points: str
    """The `points` attribute of an SVG polygon that is closed along the bottom."""
    peak_x: float
    peak_y: float
    highest: int
    """Bytes at the top of the field."""


def draw_memory_curve(timeline: Timeline) -> MemoryCurve:
    """Return the curve of a timeline's tensors, in the order of issue."""
    count = max(len(timeline.spans), 1)
    highest = max(timeline.peak.num_bytes, *(s.live for s in timeline.spans), 1)
    step = -(-count // _POINTS)
    points: list[tuple[float, float]] = []
    for begin in range(0, len(timeline.spans), step):
        group = timeline.spans[begin : begin + step]
        live = max(span.live for span in group)
        points.append((1000 * begin / count, 200 - 190 * live / highest))
    if points:
        points.append((1000.0, points[-1][1]))
    issued = next(
        (
            at
            for at, span in enumerate(timeline.spans)
            if span.live == timeline.peak.num_bytes
        ),
        0,
    )
    outline = [(0.0, 200.0), *points, (1000.0, 200.0)]
    return MemoryCurve(
        points=" ".join(f"{x:.1f},{y:.1f}" for x, y in outline),
        peak_x=1000 * issued / count,
        peak_y=200 - 190 * timeline.peak.num_bytes / highest,
        highest=highest,
    )
