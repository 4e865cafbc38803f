"""Layers dealt to the devices of one process; on a CPU every device is the same one."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.layouts import even_cuts
from bigmodel.plans import Plan, Stages


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world != 1:
        return
    yield (
        "naive",
        Plan(
            backend="naive",
            units=units,
            devices_per_process=2,
            stages=Stages(schedule="naive", cuts=even_cuts(units, 2)),
        ),
    )
