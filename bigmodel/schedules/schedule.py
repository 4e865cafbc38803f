"""What a plan needs to know of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bigmodel.schedules.action import Rows
from bigmodel.schedules.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule."""

    rows: Callable[[int, int, int], Rows]
    """From ranks, stages and micro-batches to what every rank does."""
    placement: Placement = "one"
    refusal: Callable[[int, int, int], str] = lambda ranks, stages, count: ""
    """From the same to why it cannot run; empty if it can."""
    holds_all: bool = False
    """Whether activations of all micro-batches are live at the same time."""
    splits_backward: bool = False
    """Whether gradients of weights are computed apart from those of inputs."""
