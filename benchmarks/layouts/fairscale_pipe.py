"""fairscale's Pipe, which takes an `nn.Sequential` only."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.layouts import even_cuts
from bigmodel.plans import Plan, Stages


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world != 1 or any("." in unit for unit in units):
        return
    yield (
        "pipe",
        Plan(
            backend="fairscale_pipe",
            units=units,
            devices_per_process=2,
            stages=Stages(schedule="gpipe", cuts=even_cuts(units, 2)),
            accumulation=2,
        ),
    )
