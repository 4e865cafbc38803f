"""One launch of two processes for all checks, whichever file asks first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker.py")
WORLD = 2


@cache
def outcome() -> list[dict[str, str]]:
    """Return what each rank says of every check: nothing where all is well."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={WORLD}", str(WORKER), str(folder)]
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
        files = [folder / f"{rank}.json" for rank in range(WORLD)]
        if not all(file.exists() for file in files):
            ended = f"the launch ended early:\n{done.stdout[-4000:]}"
            pytest.fail(ended, pytrace=False)
        return [json.loads(file.read_text()) for file in files]


def check(name: str) -> None:
    """Fail unless all ranks passed the check."""
    for rank, result in enumerate(outcome()):
        text = result.get(name, "the launch ended before this check")
        if text:
            pytest.fail(f"rank {rank}: {text}", pytrace=False)
