"""Every backend against one process: the same losses and the same weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.layouts import not_here
from benchmarks.parity.cases import WORLDS, Case, cases
from benchmarks.parity.comparison import deviation, run_matrix

SECONDS = 560


@pytest.fixture(scope="session")
def outcome(tmp_path_factory) -> Callable[[int], tuple[Path, str]]:
    """Return folder and output of one launch for all cases of a world size."""

    @cache
    def launch(world: int) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(f"parity-{world}")
        return folder, run_matrix(world, folder, quick=True, seconds=SECONDS)

    return launch


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, id=f"{world}-{case.name}")
        for world in WORLDS
        for case in cases(world, quick=True)
    ],
)
def test_equals_one_process(outcome, world: int, case: Case) -> None:
    if reason := not_here(case.plan):
        pytest.skip(reason)
    assert deviation(case, *outcome(world)).faults(case) == []
