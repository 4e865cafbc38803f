"""Live bytes over one step, thinned to columns without losing a peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bigmodel.simulator import Timeline

_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Column:
    """Tasks that lie together in the order of issue."""

    live: int
    """Most bytes that are live during one of them."""
    phase: str
    """Phase of the first one."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Neighbouring columns of one phase."""

    name: str
    begin: int
    end: int


def thin(timeline: Timeline, most: int) -> tuple[Column, ...]:
    """Return so many columns, or one for every task where there are fewer tasks."""
    spans = timeline.spans
    phases = _phases([span.label for span in spans])
    count = min(most, len(spans))
    bounds = [index * len(spans) // count for index in range(count)] + [len(spans)]
    return tuple(
        Column(
            live=max(span.live for span in spans[begin:end]),
            phase=phases[begin],
        )
        for begin, end in pairwise(bounds)
    )


def runs(columns: Sequence[Column]) -> tuple[Phase, ...]:
    """Return the phases in order."""
    found: list[Phase] = []
    for index, column in enumerate(columns):
        begin = index
        if found and found[-1].name == column.phase:
            begin = found.pop().begin
        found.append(Phase(column.phase, begin, index + 1))
    return tuple(found)


def highest(columns: Sequence[Column]) -> int:
    """Return the index of the column with the peak."""
    return max(range(len(columns)), key=lambda index: columns[index].live)


def _phases(labels: Sequence[str]) -> list[str]:
    """Return the phase of every task: that of the last unit or step before it."""
    current, found = _PHASES[0], []
    for label in labels:
        words = label.removeprefix("end of ")
        current = next((name for name in _PHASES if words.startswith(name)), current)
        found.append(current)
    return found
