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
    # A quarter of the gradients, in fp32.
    bucket = elements / MIB
    plan = Plan(
        backend="ddp",
        mesh=Mesh(replicate=world),
        units=units,
        ddp=DdpOptions(bucket_megabytes=bucket),
    )
    yield "ddp", plan
    yield "ddp-zero1", replace(plan, zero_stage=1)
    if world > 2:
        return
    yield "ddp-compile", replace(plan, compile=True)
    for name, changed in {
        "copies": {"gradient_views": False},
        "first": {"first_bucket_megabytes": bucket / 4},
        "unused": {"find_unused": True},
        "static": {"static_graph": True},
        "fp16-hook": {"hook": "fp16"},
        "powersgd": {
            "hook": "powersgd",
            "powersgd_start": 2,
            "powersgd_rank": 2,
            # gloo: one bucket only.
            "bucket_megabytes": 25.0,
        },
    }.items():
        yield f"ddp-{name}", replace(plan, ddp=replace(plan.ddp, **changed))
