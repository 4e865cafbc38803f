"""`fully_shard`, torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigmodel.plans import Fsdp2Options, Mesh, Plan


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world == 1:
        return
    plan = Plan(backend="fsdp2", mesh=Mesh(shard=world), units=units)
    yield "fsdp2", plan
    keep = Fsdp2Options(reshard_after_forward=False)
    yield "fsdp2-keep", replace(plan, fsdp2=keep)
    if world == 4:
        yield "hybrid", replace(plan, mesh=Mesh(replicate=2, shard=2))
