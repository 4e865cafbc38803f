"""DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigmodel.plans import DdpOptions, Mesh, Plan
from bigmodel.units import MIB


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world == 1:
        return
    bucket = 4 * elements / 4 / MIB
    plan = Plan(backend="ddp", mesh=Mesh(replicate=world), units=units)
    for name, options in {
        "ddp": DdpOptions(bucket_megabytes=bucket),
        "ddp-copies": DdpOptions(bucket_megabytes=bucket, gradient_views=False),
    }.items():
        yield name, replace(plan, ddp=options)
