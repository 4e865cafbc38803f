"""A decision as one HTML page that needs nothing else: no network, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigmodel.reports.memory_bars import draw_memory_bars
from bigmodel.reports.rendering import render
from bigmodel.search.decision import Decision
from bigmodel.search.rejections import group_rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A predicted quantity beside the measured one."""

    name: str
    predicted: float
    measured: float
    is_bytes: bool = True
    """Bytes, or else seconds."""

    @property
    def error(self) -> float:
        """Share by which the prediction is above what was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def render_page(decision: Decision, measured: Sequence[Comparison] = ()) -> str:
    """Return the page of a decision.

    Args:
        decision: What was decided.
        measured: Shown as a section of its own, where a run was measured.
    """
    best = decision.best
    return render(
        "page.html",
        best,
        best.fullest,
        decision=decision,
        best=best,
        estimates=(best, *decision.runners_up),
        bars=draw_memory_bars((best, *decision.runners_up)),
        rejected=group_rejected(decision.rejected),
        measured=tuple(measured),
    )


def save_page(
    decision: Decision, path: str | Path, measured: Sequence[Comparison] = ()
) -> Path:
    """Write the page of a decision and return its path."""
    path = Path(path)
    path.write_text(render_page(decision, measured), encoding="utf-8")
    return path
