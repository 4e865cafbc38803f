"""GPipe: all forwards, then all backwards.

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
    rank 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    rank 2  .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3
    rank 3  .  .  .  F0 F1 F2 F3 B0 B1 B2 B3

Every micro-batch is in flight at the turn. Source: Huang et al. 2018, arXiv 1811.06965;
the order of backwards is that of `torch.distributed.pipelining.ScheduleGPipe`.
"""

from __future__ import annotations

from bigmodel.schedules.action import Action, Rows


def rows(num_ranks: int, num_stages: int, num_micro_batches: int) -> Rows:
    """Return the actions of every rank, one stage a rank."""
    return tuple(
        tuple(Action(stage, "F", index) for index in range(num_micro_batches))
        + tuple(Action(stage, "B", index) for index in range(num_micro_batches))
        for stage in range(num_stages)
    )
