"""Filling a template with an estimate and with what its pictures need."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader

from bigmodel.reports.memory_curve import MemoryCurve, draw_memory_curve
from bigmodel.reports.streams_chart import draw_streams
from bigmodel.reports.unit_rows import unit_rows
from bigmodel.search.prediction import Estimate, RankMemory
from bigmodel.units import format_bytes, format_ranges, format_seconds

_CURVES = 16
"""Stages of a pipeline whose curves are drawn."""


def render(template: str, estimate: Estimate, shown: RankMemory, **values: Any) -> str:
    """Return a page.

    Args:
        template: Its file in this folder.
        estimate: Whose sections it has.
        shown: The entry of `estimate.ranks` that is explained.
        values: What else the template reads.
    """
    environment = Environment(
        loader=PackageLoader("bigmodel.reports", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["in_bytes"] = format_bytes
    environment.filters["in_seconds"] = format_seconds
    return environment.get_template(template).render(
        estimate=estimate,
        shown=shown,
        whose=_whose(estimate, shown),
        unit_rows=unit_rows(shown.units),
        curves=_curves(estimate, shown),
        lanes=draw_streams(estimate.timelines),
        span=max((t.seconds for t in estimate.timelines), default=0.0),
        **values,
    )


def _whose(estimate: Estimate, shown: RankMemory) -> str:
    if len(estimate.ranks) == 1:
        return "Every rank"
    return f"Stage {shown.stage} (ranks {format_ranges(shown.ranks)})"


def _curves(estimate: Estimate, shown: RankMemory) -> list[tuple[str, MemoryCurve]]:
    """Return a curve for every stage: of the rank that is shown, or of the fullest."""
    chosen = {rank.stage: rank for rank in estimate.ranks}
    for rank in estimate.ranks:
        if rank.device_total > chosen[rank.stage].device_total:
            chosen[rank.stage] = rank
    chosen[shown.stage] = shown
    if len(chosen) > _CURVES:
        chosen = {shown.stage: shown}
    drawn = []
    for rank in chosen.values():
        timeline = estimate.timeline_of(rank)
        curve = draw_memory_curve(timeline) if timeline else None
        if curve is not None:
            name = _whose(estimate, rank) if len(chosen) > 1 else ""
            drawn.append((name, curve))
    return drawn
