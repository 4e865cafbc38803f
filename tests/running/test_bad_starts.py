"""What can go wrong between ranks ends soon, with a message that names the rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bad_start.py")

EXPECTED = {
    # mode: exit codes by rank, None for any; words on stderr of the ranks
    "world": ((2, 2), ("processes is 2", "")),
    "plans": ((2, 2), ("the plans differ: rank 1", "")),
    "absent1": ((1, None), ("rank 1 never came", "")),
    "absent0": ((None, 1), ("", "rank 0")),
    "sleep": ((1, None), ("rank 0, in step 3 (", "")),
    "raise": (
        (1, 2),
        ("because rank 1 failed in step 3 (bad_start.py:", "the batch is 3"),
    ),
    "die": ((1, 7), ("waited in vain for rank 1, which only came to step 2", "")),
    "memory": (
        (1, 1),
        ("because rank 1 failed in backward of step 2 (bad_start.py:", "no memory"),
    ),
    # Ended by the alarm that run_main sets.
    "teardown": ((1, -signal.SIGALRM), ("because rank 1 failed", "no memory")),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Path:
    """Run all modes, and return the folder of what they left."""
    folder = tmp_path_factory.mktemp("bad-starts")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *EXPECTED],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("mode", EXPECTED)
def test_ends_with_a_clear_message(outcomes, mode: str) -> None:
    ends = json.loads((outcomes / "ends.json").read_text())
    codes, words = EXPECTED[mode]
    for rank in range(2):
        error = (outcomes / f"{mode}-{rank}.err").read_text()
        if codes[rank] is not None:
            assert ends[f"{mode}-{rank}"][0] == codes[rank], error
        if codes[rank] is not None and "no memory" not in error:
            assert "Traceback" not in error, error
        assert words[rank] in error


def test_hang_13_names_the_missing_rank_its_last_call_and_the_line(outcomes) -> None:
    error = (outcomes / "sleep-0.err").read_text()
    line = next(
        number
        for number, text in enumerate(SCRIPT.read_text().splitlines(), 1)
        if "engine.step((torch.zeros(1, 4)" in text
    )
    assert (
        f"rank 0, in step 3 (bad_start.py:{line}), waited in vain for rank 1, which "
        f"only came to step 2 (bad_start.py:{line})"
    ) in error


@pytest.mark.parametrize(("mode", "seconds"), [("memory", 10), ("teardown", 20)])
def test_hang_10_all_are_gone_soon(outcomes, mode: str, seconds: float) -> None:
    ends = json.loads((outcomes / "ends.json").read_text())
    error = (outcomes / f"{mode}-1.err").read_text()
    failed = float(error.split("failed at ")[1].split()[0])
    assert max(ends[f"{mode}-{rank}"][1] for rank in range(2)) - failed < seconds


def test_hang_16_the_report_of_the_failed_rank_has_its_traceback(outcomes) -> None:
    report = json.loads((outcomes / "teardown" / "rank-1.json").read_text())["message"]
    assert report["message"] == "MemoryError: no memory"
    assert report["extraInfo"]["where"].startswith("backward of step 2 (bad_start.py:")
    assert "in backward\n" in report["extraInfo"]["py_callstack"]
    other = json.loads((outcomes / "teardown" / "rank-0.json").read_text())["message"]
    assert other["message"].startswith("WorkerError: rank 0, in step 2")
