"""The plan's schedules and the classes of torch that run them."""

from __future__ import annotations

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)

from bigmodel.errors import UnknownNameError

TORCH_SCHEDULES: dict[
    str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]
] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""By the names in `bigmodel.schedules.SCHEDULES`, whose rows are what these do."""


def torch_schedule(
    name: str,
) -> type[PipelineScheduleSingle] | type[PipelineScheduleMulti]:
    """Return the class that runs a schedule.

    Raises:
        UnknownNameError: torch has no such schedule.
    """
    if name not in TORCH_SCHEDULES:
        raise UnknownNameError("pipeline schedule", name, TORCH_SCHEDULES)
    return TORCH_SCHEDULES[name]
