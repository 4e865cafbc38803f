"""DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.plans import DeepSpeedOptions, Mesh, Offload, Plan

_LOW = 100
"""Elements above which a parameter is sharded under stage 3. With DeepSpeed's own
threshold every parameter of the small models would be whole on every rank."""


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world == 1:
        return

    bucket = max(elements // 4, 1)

    def plan(stage: int, offload: Offload | None = None, **options) -> Plan:
        return Plan(
            backend="deepspeed",
            mesh=Mesh(shard=world),
            units=units,
            zero_stage=stage,
            offload=offload or Offload(),
            deepspeed=DeepSpeedOptions(bucket_elements=bucket, **options),
        )

    for stage in (1, 2, 3):
        yield f"zero{stage}", plan(stage)
    # At 4 ranks there are two groups, at 2 one.
    yield (
        "zero3-hpz",
        plan(3, zero_hpz_partition_size=2, param_persistence_threshold=_LOW),
    )
    if world > 2:
        return
    states = Offload(optimizer="cpu")
    yield "zero1-offload-overlap", plan(1, states, overlap_comm=True)
    yield "zero2-offload", plan(2, states)
    yield "zero2-overlap", plan(2, overlap_comm=True)
    yield "zero2-unused", plan(2, find_unused=True)
    both = Offload(optimizer="cpu", parameters="cpu")
    yield "zero3-offload", plan(3, both, param_persistence_threshold=_LOW)
    yield (
        "zero3-no-prefetch",
        plan(
            3,
            prefetch_bucket_size=0,
            sub_group_size=bucket,
            param_persistence_threshold=_LOW,
        ),
    )
