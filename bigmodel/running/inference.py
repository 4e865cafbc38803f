"""Forwards without training, as many on every rank as the rank with most needs.

Where weights are sharded, a forward is collective: a rank that has finished, such as
one whose sequence ended early, must go on running forwards until all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigmodel.backends.batch import to_device
from bigmodel.backends.evaluation import evaluating
from bigmodel.backends.whole_model import AbstractWholeModelEngine
from bigmodel.errors import UsageError
from bigmodel.plans import Plan
from bigmodel.running.agreement import gather_numbers


@contextmanager
def inferring(
    engine: AbstractWholeModelEngine, plan: Plan, device: torch.device
) -> Iterator[Callable[..., Any]]:
    """Yield the model, to be called any number of times; see `Engine.inference`."""
    shared = plan.mesh.shard > 1
    last: tuple[Any, Any] | None = None

    def call(*positional: Any, **named: Any) -> Any:
        nonlocal last
        if shared:
            gather_numbers(1, plan.world, device)
        inputs, keywords = last = to_device((positional, named), device)
        return engine.infer(*inputs, **keywords)

    with evaluating(engine.module):
        try:
            yield call
            while shared and any(gather_numbers(0, plan.world, device)):
                if last is None:
                    raise UsageError(
                        "this rank has run no forward, while others have, and the "
                        "weights are sharded over all: give every rank at least one"
                    )
                engine.infer(*last[0], **last[1])
        finally:
            engine.end_evaluation()
