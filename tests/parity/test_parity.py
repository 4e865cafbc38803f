"""Every backend against one process: the same losses and the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.parity.cases import CASES, Case
from tests.parity.reference import run_alone

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 560


@pytest.fixture(scope="session")
def outcome(tmp_path_factory) -> Callable[[int, Case], dict]:
    """Return the result of a case, from one launch for all cases of a world size."""

    @cache
    def launch(world: int) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(f"parity-{world}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={world}", str(WORKER), str(folder)]
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return folder, done.stdout

    def get(world: int, case: Case) -> dict:
        folder, output = launch(world)
        error = folder / f"{case.name}.error"
        if error.exists():
            pytest.fail(error.read_text(), pytrace=False)
        result = folder / f"{case.name}.pt"
        if not result.exists():
            pytest.fail(f"the launch ended early:\n{output[-4000:]}", pytrace=False)
        return torch.load(result)

    return get


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, id=f"{world}-{case.name}")
        for world, cases in CASES.items()
        for case in cases
    ],
)
def test_equals_one_process(outcome, world: int, case: Case) -> None:
    got, expected = outcome(world, case), run_alone(case)
    close = {"rtol": 0, "atol": case.tolerance}
    torch.testing.assert_close(got["losses"], expected.losses, **close)
    torch.testing.assert_close(got["evaluation"], expected.evaluation, **close)
    assert len(got["norms"]) == len(expected.norms)
    weights = got["weights"]
    assert weights.keys() == expected.weights.keys()
    if case.plan.precision == "fp32":
        torch.testing.assert_close(got["norms"], expected.norms, rtol=1e-4, atol=1e-5)
        for name, value in expected.weights.items():
            torch.testing.assert_close(
                weights[name], value, **close, msg=lambda text, name=name: name + text
            )
    if case.clip_norm is not None:
        assert max(expected.norms) > case.clip_norm, "the case does not clip"
    if case.resume:
        assert got["steps"] == 7
        for name, value in got["went_on"].items():
            torch.testing.assert_close(got["resumed"][name], value, rtol=0, atol=1e-6)
