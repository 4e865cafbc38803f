"""DeepSpeed's pipeline engine, which takes an `nn.Sequential` only."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.layouts import even_cuts
from bigmodel.plans import DeepSpeedOptions, Mesh, Plan, Stages


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world == 1 or any("." in unit for unit in units):
        return
    inside = world // 2
    stages = Stages(schedule="1f1b", cuts=even_cuts(units, 2))
    for name, mesh, zero in (
        ("dspipe", Mesh(pipeline=2, replicate=inside), 0),
        ("dspipe-zero1", Mesh(pipeline=2, shard=inside), 1),
    ):
        yield (
            name,
            Plan(
                backend="deepspeed_pipeline",
                mesh=mesh,
                units=units,
                stages=stages,
                zero_stage=zero,
                accumulation=2,
                deepspeed=DeepSpeedOptions(bucket_elements=max(elements // 8, 1))
                if zero
                else DeepSpeedOptions(),
            ),
        )
