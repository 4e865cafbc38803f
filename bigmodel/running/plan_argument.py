"""What may stand where a plan is expected."""

from __future__ import annotations

from pathlib import Path

from bigmodel.errors import UsageError
from bigmodel.plans import Plan
from bigmodel.plans.document import load


def as_plan(source: object) -> Plan:
    """Return the plan that is, or is held by, or is written in `source`.

    Args:
        source: A `Plan`, the path of a plan file, something with a plan (`.plan`), or
            a decision, whose `.best` is the plan or has it.
    """
    if isinstance(source, Plan):
        return source
    if isinstance(source, (str, Path)):
        return load(source)
    best = getattr(source, "best", source)
    plan = best if isinstance(best, Plan) else getattr(best, "plan", None)
    if isinstance(plan, Plan):
        return plan
    raise UsageError(
        f"a {type(source).__name__} is no plan; give a Plan, the path of a plan file, "
        "or what bigmodel.plan() returned"
    )
