"""What every tool looks like here: from a case to bytes, or to why there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.memory_accuracy.cases import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A tool's answer."""

    allocated: int
    """Peak of the fullest rank, in bytes, or what the tool gives in its place."""
    outside: str = ""
    """What of the case lies outside of the tool's own premises; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a tool has no answer."""

    text: str


Answer = Prediction | Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One tool."""

    name: str
    counts: str
    """What is in its number and what is not, for the legend."""
    estimate: Callable[[Case], Answer]
    """Does all that the tool needs, such as making the model."""
