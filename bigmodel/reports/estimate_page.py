"""An estimate as one HTML page that needs nothing else: no network, no scripts."""

from __future__ import annotations

from bigmodel.reports.rendering import render
from bigmodel.search.prediction import Estimate


def render_estimate_page(
    estimate: Estimate, title: str, rank: int | None = None
) -> str:
    """Return the page of an estimate.

    Args:
        estimate: What was predicted.
        title: What for: model and cluster in words.
        rank: Whose memory is explained; None: the fullest's.

    Raises:
        UsageError: The plan has no such rank.
    """
    shown = estimate.of_rank(rank)
    return render("estimate.html", estimate, shown, title=title)
