"""torch's pipeline schedules, alone and with DDP or FSDP2 within the stages."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.layouts import even_cuts
from bigmodel.plans import Mesh, Plan, Stages

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "interleaved-zb": 2,
    "zbv": 2,
    "dualpipev": 2,
}
"""Stages on a rank."""


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world == 1:
        return
    meshes = {"": Mesh(pipeline=world)}
    if world == 4:
        meshes["-ddp"] = Mesh(pipeline=2, replicate=2)
        meshes["-fsdp2"] = Mesh(pipeline=2, shard=2)
    for suffix, mesh in meshes.items():
        for schedule, laps in SCHEDULES.items():
            if suffix and schedule not in ("1f1b", "interleaved"):
                continue
            if laps * mesh.pipeline > len(units):
                continue
            cuts = even_cuts(units, laps * mesh.pipeline)
            yield (
                schedule + suffix,
                Plan(
                    backend="pipeline",
                    mesh=mesh,
                    units=units,
                    stages=Stages(schedule=schedule, cuts=cuts),
                    accumulation=1 if schedule == "gpipe" else len(cuts) + 1,
                ),
            )
