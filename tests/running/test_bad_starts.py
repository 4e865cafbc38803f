"""What can go wrong between ranks ends soon, with a message that names the rank."""

from __future__ import annotations

import os
import socket
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
    "sleep": (
        (1, None),
        ("waited in vain for rank 1, which only came to step 2 (bad_start.py:", ""),
    ),
    "raise": (
        (1, 2),
        ("because rank 1 failed in step 3 (bad_start.py:", "the batch is 3"),
    ),
    "die": ((1, 7), ("waited in vain for rank 1, which only came to step 2", "")),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(mode: str) -> list[subprocess.Popen]:
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), mode],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.fixture(scope="module")
def outcomes():
    """Run all modes at once: most of their time is waiting."""
    started = {mode: start(mode) for mode in EXPECTED}
    results = {}
    try:
        for mode, processes in started.items():
            results[mode] = []
            for process in processes:
                _, error = process.communicate(timeout=150)
                results[mode].append((process.returncode, error))
    finally:
        for processes in started.values():
            for process in processes:
                process.kill()
    return results


@pytest.mark.parametrize("mode", EXPECTED)
def test_ends_with_a_clear_message(outcomes, mode: str) -> None:
    codes, words = EXPECTED[mode]
    for (code, error), expected, word in zip(outcomes[mode], codes, words, strict=True):
        if expected is not None:
            assert code == expected, error
            assert "Traceback" not in error, error
        assert word in error
