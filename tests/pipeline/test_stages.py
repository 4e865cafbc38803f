"""Two real stages: models of transformers, frozen stages, shapes, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.checks import CHECKS

WORKER = Path(__file__).with_name("worker.py")
WORLD = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    """Return what each rank says of every check, all from one launch."""
    folder = tmp_path_factory.mktemp("pipeline")
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


@pytest.mark.parametrize("name", CHECKS)
def test_check(results, name: str) -> None:
    for rank, result in enumerate(results):
        text = result.get(name, "the launch ended before this check")
        if text:
            pytest.fail(f"rank {rank}: {text}", pytrace=False)
