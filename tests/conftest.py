"""What holds for every test."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_group_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a process group that a test has left: later tests would join it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    # What still holds it, such as DDP, must go first, or ending it can hang.
    gc.collect()
    distributed.destroy_process_group()
    warnings.warn(f"{request.node.nodeid} left a process group behind", stacklevel=1)
