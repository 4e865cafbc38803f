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
    if world == 4:
        yield "hybrid", replace(plan, mesh=Mesh(replicate=2, shard=2))
        smaller = Fsdp2Options(reshard_after_forward=2)
        yield "fsdp2-smaller", replace(plan, fsdp2=smaller)
        return
    for name, options in {
        "keep": Fsdp2Options(reshard_after_forward=False),
        "prefetch": Fsdp2Options(prefetch=2),
        "postpone": Fsdp2Options(postpone_reduction=True),
        # A block with weights in all models, and not the frozen one of all.
        "ignored": Fsdp2Options(ignored=(units[2],)),
    }.items():
        yield f"fsdp2-{name}", replace(plan, fsdp2=options)
    yield "fsdp2-compile", replace(plan, compile=True)
