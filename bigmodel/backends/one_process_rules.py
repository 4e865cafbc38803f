"""What every backend of one process with several devices refuses. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.plans import Plan


def one_process_violations(plan: Plan, cluster: Cluster | None) -> Iterator[Violation]:
    """Yield several processes, a single device, and devices of several machines."""
    name, count = plan.backend, plan.devices_per_process
    if plan.world > 1:
        yield Violation(
            field="mesh",
            got=str(plan.mesh),
            rule=f"backend {name!r} is one process that owns several devices",
            cure=f"use Mesh() and devices_per_process={plan.world}",
        )
    if count < 2:
        yield Violation(
            field="devices_per_process",
            got=count,
            rule=f"backend {name!r} spreads its work over at least 2 devices",
            cure="use backend 'ddp' for one device",
        )
    if cluster is not None and cluster.num_nodes > 1:
        yield Violation(
            field="devices_per_process",
            got=count,
            rule=f"a process owns devices of one machine, and {cluster.name} has "
            f"{cluster.num_nodes}",
            cure="use a backend with a process for every device",
        )


def stage_violations(plan: Plan, schedule: str) -> Iterator[Violation]:
    """Yield stages that are not one for every device, or of another schedule."""
    if plan.stages is None:
        yield Violation(
            field="stages",
            got=None,
            rule=f"backend {plan.backend!r} deals stages to its devices",
            cure=f"set stages=Stages(schedule={schedule!r}, cuts=...)",
        )
        return
    if plan.stages.schedule != schedule:
        yield Violation(
            field="stages.schedule",
            got=plan.stages.schedule,
            rule=f"backend {plan.backend!r} has schedule {schedule!r} only",
            cure="use backend 'pipeline'",
        )
    if plan.num_stages != plan.devices_per_process:
        yield Violation(
            field="stages.cuts",
            got=plan.stages.cuts,
            rule=f"{plan.num_stages} stages do not fit {plan.devices_per_process} "
            "devices: each holds one",
            cure=f"use {plan.devices_per_process - 1} cuts",
        )


def even_cuts(units: int, stages: int) -> tuple[int, ...]:
    """Return cuts into stages of about as many units each."""
    return tuple(units * index // stages for index in range(1, stages))
