"""Which rank of a pipeline holds which stages.

one     rank 0: 0      rank 1: 1                   as many stages as ranks
loop    rank 0: 0 2    rank 1: 1 3                 a multiple of the ranks
v       rank 0: 0 3    rank 1: 1 2                 twice as many: down and back up
"""

from __future__ import annotations

from typing import Literal

Placement = Literal["one", "loop", "v"]


def owner(stage: int, ranks: int, stages: int, placement: Placement) -> int:
    """Return the rank of a pipeline that holds a stage."""
    if placement == "v" and stage >= ranks:
        return stages - 1 - stage
    return stage % ranks


def stages_of(
    rank: int, ranks: int, stages: int, placement: Placement
) -> tuple[int, ...]:
    """Return the stages of a rank, first one first."""
    return tuple(
        stage
        for stage in range(stages)
        if owner(stage, ranks, stages, placement) == rank
    )


def count_refusal(ranks: int, stages: int, placement: Placement) -> str:
    """Return why so many stages cannot be placed on the ranks; empty if they can."""
    if placement == "one" and stages != ranks:
        return f"it holds one stage a rank, so {ranks} ranks need {ranks} stages"
    if placement == "v" and stages != 2 * ranks:
        return f"it holds two stages a rank, so {ranks} ranks need {2 * ranks} stages"
    if placement == "loop" and (stages % ranks or stages < 2 * ranks):
        return (
            f"it holds several stages a rank, as many on each: with {ranks} ranks "
            f"{2 * ranks}, {3 * ranks}, ... stages"
        )
    return ""
