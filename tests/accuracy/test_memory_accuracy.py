"""Predicted against measured peak of allocated bytes, really trained at 2 processes."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.memory_accuracy import cases as matrix
from benchmarks.memory_accuracy.__main__ import Row, compare, measure

CASES = [case.name for case in matrix.cases(quick=True)]


@cache
def rows() -> dict[str, Row]:
    """Measure all cases in one launch."""
    return {row.case: row for row in compare(measure(quick=True), quick=True)}


@pytest.mark.parametrize("case", CASES)
def test_the_predicted_peak_is_within_5_percent(case):
    row = rows()[case]
    assert abs(row.error) <= 0.05, row
