"""fairscale's OSS, in DDP and in ShardedDataParallel.

Not AdaScale, which changes the step on purpose: see `tests/cases/fairscale_checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.plans import FairscaleOptions, Mesh, Plan


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world == 1:
        return
    plans = {"oss": (1, FairscaleOptions()), "sharded-ddp": (2, FairscaleOptions())}
    if world == 2:
        # Room for the small gradients only.
        small = FairscaleOptions(reduce_buffer_elements=elements // 16)
        plans["sharded-ddp-small"] = (2, small)
    for name, (stage, options) in plans.items():
        yield (
            name,
            Plan(
                backend="fairscale",
                mesh=Mesh(shard=world),
                units=units,
                zero_stage=stage,
                fairscale=options,
            ),
        )
