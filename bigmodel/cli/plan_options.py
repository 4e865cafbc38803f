"""A plan from the options of a command line, for one model on one cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bigmodel.backends.catalog import BACKENDS
from bigmodel.errors import InvalidPlanError, Violation
from bigmodel.plans import Plan
from bigmodel.plans.training_plan import Precision, RecomputePolicy
from bigmodel.simulator import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the user said; None: not said."""

    backend: str
    micro_batch: int
    accumulation: int
    recompute: RecomputePolicy
    precision: Precision
    optimizer: str
    zero_stage: int | None = None
    stages: int | None = None
    schedule: str | None = None
    reshard: bool | None = None


def build_plan(options: PlanOptions, costs: Costs) -> Plan:
    """Return the plan that the options mean.

    Of the layouts that the backend offers for the cluster, the one that agrees with
    every option, and among several the one that shards most.

    Raises:
        UnknownNameError: There is no such backend.
        InvalidPlanError: The backend offers no such layout.
    """
    layouts = list(BACKENDS.get(options.backend).layouts(costs))
    agreeing = [layout for layout in layouts if _agrees(layout, options)]
    if not agreeing:
        raise InvalidPlanError(_no_layout(options, layouts, costs))
    layout = max(
        agreeing,
        key=lambda entry: (
            entry.zero_stage,
            entry.mesh.shard,
            entry.fsdp2.reshard_after_forward is True,
        ),
    )
    recomputed = (options.recompute,) * len(layout.units)
    return replace(
        layout,
        micro_batch=options.micro_batch,
        accumulation=options.accumulation,
        precision=options.precision,
        optimizer=options.optimizer,
        recompute=() if options.recompute == "none" else recomputed,
    )


def _values(layout: Plan) -> Mapping[str, object]:
    return {
        "zero_stage": layout.zero_stage,
        "stages": layout.mesh.pipeline,
        "schedule": layout.stages.schedule if layout.stages else None,
        "reshard": layout.fsdp2.reshard_after_forward,
    }


def _agrees(layout: Plan, options: PlanOptions) -> bool:
    return all(
        getattr(options, name) in (None, value)
        for name, value in _values(layout).items()
    )


def _no_layout(
    options: PlanOptions, layouts: list[Plan], costs: Costs
) -> list[Violation] | str:
    """Say of every option that no layout has, which values some layout has."""
    where = f"{costs.cluster.world} x {costs.cluster.device.name}"
    if not layouts:
        return (
            f"backend {options.backend!r} offers nothing for {costs.model.name} on "
            f"{where}; use another backend or another number of devices"
        )
    found = []
    for name in _values(layouts[0]):
        wanted = getattr(options, name)
        offered = dict.fromkeys(str(_values(layout)[name]) for layout in layouts)
        if wanted is not None and str(wanted) not in offered:
            found.append(
                Violation(
                    field="--" + name.replace("_", "-"),
                    got=wanted,
                    rule=f"backend {options.backend!r} on {where} offers "
                    f"{', '.join(offered)}",
                    cure="leave it out, or use another backend",
                )
            )
    return found or (
        f"backend {options.backend!r} on {where} offers no layout with all of these "
        "options together; leave one of them out"
    )
