"""Running all checks in one launch of two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker.py")
WORLD = 2


def run_checks(folder: Path) -> list[dict[str, str]]:
    """Return what each rank says of every check."""
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
        pytest.fail(f"the launch ended early:\n{done.stdout[-4000:]}", pytrace=False)
    return [json.loads(file.read_text()) for file in files]
