"""The plan's schedules and the classes of torch that run them."""

from __future__ import annotations

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from bigmodel.errors import UnknownNameError, UsageError, Violation
from bigmodel.plans import Plan

TORCH_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
}
"""By the names in `bigmodel.schedules.SCHEDULES`, whose rows are what these do."""


def torch_schedule(plan: Plan) -> type[PipelineScheduleSingle]:
    """Return the class that runs the plan's schedule.

    Raises:
        UsageError: torch has no such schedule, or refuses so few micro-batches.
    """
    if plan.stages is None:
        raise UsageError("a pipeline plan needs stages; set stages=Stages(...)")
    name = plan.stages.schedule
    if name not in TORCH_SCHEDULES:
        raise UnknownNameError("pipeline schedule", name, TORCH_SCHEDULES)
    if name == "1f1b" and plan.accumulation < plan.mesh.pipeline:
        raise UsageError(
            Violation(
                field="accumulation",
                got=plan.accumulation,
                rule="torch's 1F1B needs at least as many micro-batches as stages, "
                f"{plan.mesh.pipeline}",
                cure=f"use {plan.mesh.pipeline} or more, or schedule 'gpipe'",
            )
        )
    return TORCH_SCHEDULES[name]
