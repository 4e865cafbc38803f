"""A stacked bar of memory by holder for every plan, with a line at the capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigmodel.search.prediction import Estimate

COLOURS = 10
"""Colours of the style sheet, classes c0 to c9; holders beyond share the last one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One holder's part of a bar, in percent of the picture's width."""

    name: str
    num_bytes: int
    left: float
    width: float
    colour: int


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """The bar of one plan."""

    estimate: Estimate
    pieces: tuple[Piece, ...]
    low: float
    """Where the interval begins, in percent."""
    high: float


@dataclass(frozen=True, slots=True)
class MemoryBars:
    """All bars, their common scale and their legend."""

    bars: tuple[MemoryBar, ...]
    capacity: float
    """Where the line at the device's capacity is, in percent."""
    legend: tuple[tuple[str, int], ...]
    """Holders and their colours, the largest first."""


def draw_memory_bars(estimates: Sequence[Estimate]) -> MemoryBars:
    """Return the bars of the fullest ranks of plans on one device."""
    capacity = max(estimate.capacity for estimate in estimates)
    widest = max(*(estimate.high for estimate in estimates), capacity)
    scale = 98.0 / widest
    totals: dict[str, int] = {}
    for estimate in estimates:
        for term in estimate.fullest.terms:
            totals[term.name] = totals.get(term.name, 0) + term.num_bytes
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    colours = {name: min(at, COLOURS - 1) for at, name in enumerate(ranked)}
    bars = tuple(
        MemoryBar(
            estimate,
            _pieces(estimate, scale, colours),
            estimate.low * scale,
            estimate.high * scale,
        )
        for estimate in estimates
    )
    legend = tuple((name, colours[name]) for name in ranked)
    return MemoryBars(bars, capacity * scale, legend)


def _pieces(
    estimate: Estimate, scale: float, colours: dict[str, int]
) -> tuple[Piece, ...]:
    pieces, left = [], 0.0
    # The same order in every bar, so that bars can be compared.
    for term in sorted(estimate.fullest.terms, key=lambda t: colours[t.name]):
        width = term.num_bytes * scale
        pieces.append(Piece(term.name, term.num_bytes, left, width, colours[term.name]))
        left += width
    return tuple(pieces)
