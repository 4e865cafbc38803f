"""What DDP does on two real ranks; see checks.py."""

from __future__ import annotations

import pytest

from tests.ddp.checks import CHECKS
from tests.ddp.launch import run_checks


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    return run_checks(tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("name", CHECKS)
def test_check(results, name: str) -> None:
    for rank, result in enumerate(results):
        text = result.get(name, "the launch ended before this check")
        if text:
            pytest.fail(f"rank {rank}: {text}", pytrace=False)
