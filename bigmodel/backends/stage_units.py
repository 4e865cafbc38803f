"""Which units of a model a pipeline stage holds. Pure: no torch."""

from __future__ import annotations

from bigmodel.models import ModelSpec, Placed
from bigmodel.plans import Plan


def stage_sequence(plan: Plan, model: ModelSpec, stage: int) -> tuple[Placed, ...]:
    """Return the units of a stage in forward order."""
    owned = {plan.units[index] for index in plan.stage_units(stage)}
    count = plan.num_stages
    found: list[Placed] = []
    for index, placed in enumerate(model.sequence):
        if placed.role == "before":
            belongs = stage == 0
        elif placed.role == "after":
            belongs = stage == count - 1
        elif placed.role == "between":
            # Runs before the block that follows it.
            belongs = model.sequence[index + 1].path in owned
        else:
            belongs = placed.path in owned
        if belongs:
            found.append(placed)
    return tuple(found)
