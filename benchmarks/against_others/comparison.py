"""Asking every tool about every case, and summing up how far off they were."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.against_others.estimator import Estimator, Prediction, Reason
from benchmarks.memory_accuracy.cases import Case, cases

LAYOUTS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
"""The plain form of each; the matrix of two processes has no single one."""

MODELS = ("gpt", "mlp")
"""The textbook has a formula for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one tool said about one case."""

    answer: Prediction | Reason
    measured: int
    """Bytes."""
    seconds: float
    """Wall time of the answer, the second time the tool was asked."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None without an answer."""
        if isinstance(self.answer, Reason):
            return None
        return self.answer.allocated / self.measured - 1

    @property
    def within(self) -> bool:
        """Whether there is an answer and the case keeps to the tool's premises."""
        return isinstance(self.answer, Prediction) and not self.answer.outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case, with a cell for every tool."""

    case: str
    measured: int
    """Bytes."""
    cells: dict[str, Cell]
    """By name of the tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How far off a tool was."""

    cases: int
    median: float
    """Of the size of the error."""
    largest: float
    deepest_under_estimate: float
    seconds: float
    """Median."""


def compared_cases() -> Iterator[Case]:
    """Yield the cases of the plain layouts with one micro-batch a step."""
    for case in cases(quick=False):
        model, layout, *_ = case.name.split()
        if case.plan.accumulation == 1 and model in MODELS and layout in LAYOUTS:
            yield case


def ask(case: Case, measured: int, tools: Iterable[Estimator]) -> Row:
    """Ask all tools about a case."""
    return Row(
        case=case.name,
        measured=measured,
        cells={tool.name: _ask(tool, case, measured) for tool in tools},
    )


def _ask(tool: Estimator, case: Case, measured: int) -> Cell:
    # Once before: no tool pays for imports and caches, see torch_trackers.
    tool.estimate(case)
    start = time.perf_counter()
    answer = tool.estimate(case)
    seconds = time.perf_counter() - start
    return Cell(answer=answer, measured=measured, seconds=seconds)


def summarise(cells: Sequence[Cell]) -> Summary | None:
    """Sum up the cells with an answer; None if there are none."""
    pairs = [(cell.error, cell.seconds) for cell in cells if cell.error is not None]
    if not pairs:
        return None
    errors = [error for error, _ in pairs]
    return Summary(
        cases=len(pairs),
        median=statistics.median(map(abs, errors)),
        largest=max(map(abs, errors)),
        deepest_under_estimate=min(0.0, *errors),
        seconds=statistics.median(seconds for _, seconds in pairs),
    )
