"""1F1B: after a warm-up, one backward for every forward.

    rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 ...
    rank 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 ...
    rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 ...
    rank 3  .  .  .  F0 B0 F1 B1 F2 B2 ...

Stage r of p holds at most min(M, p - r) micro-batches. Source: Narayanan et al. 2021,
arXiv 2104.04473; the warm-up is that of `torch.distributed.pipelining.Schedule1F1B`.
"""

from __future__ import annotations

from bigmodel.schedules.action import Action, Rows


def rows(num_ranks: int, num_stages: int, num_micro_batches: int) -> Rows:
    """Return the actions of every rank, one stage a rank."""
    return tuple(
        _row(stage, num_stages, num_micro_batches) for stage in range(num_stages)
    )


def _row(stage: int, num_stages: int, count: int) -> tuple[Action, ...]:
    warm_up = min(count, num_stages - stage)
    row = [Action(stage, "F", index) for index in range(warm_up)]
    for index in range(count - warm_up):
        row.append(Action(stage, "B", index))
        row.append(Action(stage, "F", warm_up + index))
    row += [Action(stage, "B", index) for index in range(count - warm_up, count)]
    return tuple(row)


def refusal(num_ranks: int, num_stages: int, num_micro_batches: int) -> str:
    """Return why torch refuses to run it."""
    if num_micro_batches < num_stages:
        return f"it needs a micro-batch for each of {num_stages} stages"
    return ""
