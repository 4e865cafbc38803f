"""Pipeline schedules as lists of actions; a schedule is one generator."""

from __future__ import annotations

from bigmodel.registry import Registry
from bigmodel.schedules import gpipe, interleaved, one_f_one_b, v_shaped
from bigmodel.schedules.action import Action as Action
from bigmodel.schedules.action import Phase as Phase
from bigmodel.schedules.action import Rows as Rows
from bigmodel.schedules.placement import Placement as Placement
from bigmodel.schedules.placement import count_refusal as count_refusal
from bigmodel.schedules.placement import owner as owner
from bigmodel.schedules.placement import stages_of as stages_of
from bigmodel.schedules.schedule import Schedule as Schedule

SCHEDULES: Registry[Schedule] = Registry("pipeline schedule")
"""By the names that `Stages.schedule` may have."""
SCHEDULES.add("gpipe", Schedule(rows=gpipe.rows, holds_all=True))
SCHEDULES.add("1f1b", Schedule(rows=one_f_one_b.rows, refusal=one_f_one_b.refusal))
SCHEDULES.add(
    "interleaved",
    Schedule(rows=interleaved.rows, placement="loop", refusal=interleaved.refusal),
)
SCHEDULES.add(
    "interleaved-zb",
    Schedule(
        rows=interleaved.zero_bubble_rows,
        placement="loop",
        refusal=interleaved.refusal,
        splits_backward=True,
    ),
)
SCHEDULES.add(
    "zbv", Schedule(rows=v_shaped.zbv_rows, placement="v", splits_backward=True)
)
SCHEDULES.add(
    "dualpipev",
    Schedule(
        rows=v_shaped.dual_pipe_rows,
        placement="v",
        refusal=v_shaped.dual_pipe_refusal,
        splits_backward=True,
    ),
)
