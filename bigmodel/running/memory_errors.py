"""What a run says when its device's memory does not suffice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bigmodel.errors import OutOfMemoryError
from bigmodel.plans import Plan


@contextmanager
def memory_errors(plan: Plan) -> Iterator[None]:
    """Turn torch's error into one that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the device's memory does not suffice for: {plan.describe()}; use a "
            "smaller micro-batch, recompute activations, or plan again with more "
            f"memory to spare ({error})"
        ) from error
