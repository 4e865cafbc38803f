"""What holds for every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_group_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a process group that a test has left, and fail it: later ones would join."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    distributed.destroy_process_group()
    pytest.fail(f"{request.node.nodeid} left a process group behind", pytrace=False)
