"""Live bytes over one step as a curve for a page."""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.reports.memory_columns import highest, runs, thin
from bigmodel.simulator import Timeline

_POINTS = 500
_WIDTH, _HEIGHT = 1000.0, 200.0
_TALLEST = 190.0
_WORD = 60.0
"""Width of the longest word on the axis; shorter phases have none."""
_MARKS = 100
"""Phases that can be told apart on the axis; it has no marks where there are more."""


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """Where a phase lies on the axis."""

    name: str
    left: float
    width: float

    @property
    def has_room(self) -> bool:
        """Whether its name can be written there."""
        return self.width >= _WORD


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """A polyline on a field of 1000 x 200, origin top left."""

    timeline: Timeline
    points: str
    """The `points` attribute of an SVG polygon that is closed along the bottom."""
    peak_x: float
    peak_y: float
    highest: int
    """Bytes at the top of the field."""
    phases: tuple[PhaseMark, ...]
    """Empty where there are too many to tell apart."""


def draw_memory_curve(timeline: Timeline) -> MemoryCurve | None:
    """Return the curve of a timeline's tensors, in the order of issue.

    None where the timeline does not say when its tasks ran.
    """
    columns = thin(timeline, _POINTS)
    if not columns:
        return None
    top = columns[highest(columns)].live or 1
    width = _WIDTH / len(columns)
    phases = runs(columns)
    points = [
        (width * index, _HEIGHT - _TALLEST * column.live / top)
        for index, column in enumerate(columns)
    ]
    outline = [(0.0, _HEIGHT), *points, (_WIDTH, points[-1][1]), (_WIDTH, _HEIGHT)]
    return MemoryCurve(
        timeline=timeline,
        points=" ".join(f"{x:.1f},{y:.1f}" for x, y in outline),
        peak_x=width * highest(columns),
        peak_y=_HEIGHT - _TALLEST,
        highest=top,
        phases=tuple(
            PhaseMark(run.name, width * run.begin, width * (run.end - run.begin))
            for run in (phases if len(phases) <= _MARKS else ())
        ),
    )
