"""Units that are children of an `nn.Sequential`, and the stages they make."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bigmodel.errors import UsageError, Violation
from bigmodel.plans import Plan


def check_sequential(model: nn.Module, units: Sequence[str], backend: str) -> None:
    """Refuse all but an `nn.Sequential` whose units are its children, in order.

    Raises:
        UsageError: Says what the backend takes.
    """
    if (
        not isinstance(model, nn.Sequential)
        or type(model).forward is not nn.Sequential.forward
    ):
        raise UsageError(
            Violation(
                field="model",
                got=type(model).__name__,
                rule=f"backend {backend!r} cuts an nn.Sequential whose children are "
                "the units",
                cure="write it as an nn.Sequential, or use backend 'pipeline', 'fsdp2' "
                "or 'deepspeed'",
            )
        )
    children = [name for name, _ in model.named_children()]
    places = [children.index(unit) for unit in units if unit in children]
    if len(places) != len(units) or places != sorted(set(places)):
        raise UsageError(
            Violation(
                field="units",
                got=tuple(units),
                rule="the units of a pipeline over an nn.Sequential must be children "
                "of it, in their order",
                cure=f"name some of {', '.join(children)}",
            )
        )


def stage_bounds(model: nn.Sequential, plan: Plan) -> list[int]:
    """Return the index of every stage's first child, and the number of children.

    What comes before the first unit belongs to the first stage; a child between two
    units belongs to the stage of the unit before it.
    """
    children = [name for name, _ in model.named_children()]
    starts = [
        children.index(plan.units[plan.stage_units(stage).start])
        for stage in range(plan.num_stages)
    ]
    return [0, *starts[1:], len(children)]
