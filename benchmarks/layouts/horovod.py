"""Horovod's DistributedOptimizer, where it can be imported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigmodel.plans import HorovodOptions, Mesh, Plan


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world != 2:
        return
    plan = Plan(
        backend="horovod",
        mesh=Mesh(replicate=world),
        units=units,
        # One value: a process keeps the buffer that it has started Horovod with. Small:
        # it is made on Horovod's thread, where the recorder of memory sees nothing.
        horovod=HorovodOptions(fusion_megabytes=0.25),
    )
    yield "horovod", plan
    compressed = replace(plan.horovod, compression="fp16")
    yield "horovod-fp16", replace(plan, horovod=compressed)
