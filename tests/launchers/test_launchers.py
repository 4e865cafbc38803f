"""The same script under every launcher: the same losses as in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.parity.cases import Case
from benchmarks.parity.forked import WAYS
from benchmarks.parity.launchers import (
    CASES,
    FORKED,
    LAUNCHERS,
    Launcher,
    clean_environment,
    finish,
    launched_cases,
    launched_deviation,
    run_launcher,
)

STARTED = [
    launcher
    for launcher in LAUNCHERS
    # Over ssh in test_nodes.py.
    if launcher.name not in WAYS and launcher.name != "deepspeed-no-local-rank"
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Callable[[str], tuple[Path, str]]:
    """Run two launches at a time; return folder and output of one."""
    root = tmp_path_factory.mktemp("launchers")
    running: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(max_workers=2) as pool:
        for launcher in STARTED:
            if not launcher.not_here():
                running[launcher.name] = pool.submit(
                    run_launcher, launcher, root / launcher.name
                )
        (root / "ways").mkdir()
        words = [sys.executable, str(FORKED), ",".join(WAYS), str(root / "ways")]
        words += ["launched", *CASES]
        ways = pool.submit(finish, words, clean_environment(), 240)

    def outcome(name: str) -> tuple[Path, str]:
        if name in WAYS:
            return root / "ways" / name, ways.result()
        return root / name, running[name].result()

    return outcome


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", launched_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize(
    "launcher",
    [*STARTED, *(launcher for launcher in LAUNCHERS if launcher.name in WAYS)],
    ids=lambda launcher: launcher.name,
)
def test_trains_the_same(outputs, launcher: Launcher, case: Case) -> None:
    if reason := launcher.not_here():
        pytest.skip(reason)
    folder, output = outputs(launcher.name)
    assert launched_deviation(launcher, case, folder, output).faults(case) == []
