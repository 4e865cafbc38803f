"""DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.plans import DeepSpeedOptions, Mesh, Plan


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world == 1:
        return
    for stage in (1, 2, 3):
        yield (
            f"zero{stage}",
            Plan(
                backend="deepspeed",
                mesh=Mesh(shard=world),
                units=units,
                zero_stage=stage,
                deepspeed=DeepSpeedOptions(bucket_elements=max(elements // 4, 1)),
            ),
        )
