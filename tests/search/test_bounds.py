"""What a plan needs at least is never more than it holds."""

from __future__ import annotations

import pytest

from benchmarks.memory_accuracy.__main__ import costs_of
from bigmodel.backends.catalog import BACKENDS
from bigmodel.models import OPTIMIZERS
from bigmodel.plans import Mesh, Plan
from bigmodel.search.bounds import Bounds
from bigmodel.simulator.program import total


@pytest.mark.parametrize("optimizer", OPTIMIZERS.names())
def test_bytes_at_least_are_at_most_those_between_steps(optimizer):
    costs = costs_of("gpt", "fp32")
    plan = Plan(
        backend="ddp",
        mesh=Mesh(replicate=2),
        units=costs.model.units,
        optimizer=optimizer,
    )
    (program,) = BACKENDS.get("ddp").programs(plan, costs, 1)
    kept = {"weights", "optimizer states", "fp32 master weights"}
    held = total(tuple(entry for entry in program.base if entry[0] in kept))
    assert Bounds(costs).memory(plan) <= held
