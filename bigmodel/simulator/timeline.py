"""A Timeline: what ran when, and which bytes were live."""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.simulator.program import Holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A task with its time."""

    label: str
    stream: str
    start: float
    end: float
    live: int
    """Live bytes at the worst moment of the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment with the most live bytes."""

    num_bytes: int
    holders: Holdings
    """Who holds them, largest first."""
    moment: str
    """Label of the task that was issued then."""
    seconds: float
    """When its stream started on it."""
    task: int = -1
    """Index of the task in its program; -1 between steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One rank's step."""

    spans: tuple[Span, ...]
    base: Holdings
    """What is live before the step and after it."""
    peak: Peak
    seconds: float
    """From the first task to the end of the last one."""
    busy: dict[str, float]
    """Seconds in which each stream works."""
    waiting: float
    """Seconds in which the compute stream does nothing: exposed communication, and in
    a pipeline the bubble."""
