"""torch's pipeline schedules, alone and with DDP or FSDP2 within the stages."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.layouts import even_cuts
from bigmodel.plans import Mesh, Plan, Stages


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
        for schedule in ("gpipe", "1f1b"):
            if suffix and schedule == "gpipe":
                continue
            cuts = even_cuts(units, mesh.pipeline)
            yield (
                schedule + suffix,
                Plan(
                    backend="pipeline",
                    mesh=mesh,
                    units=units,
                    stages=Stages(schedule=schedule, cuts=cuts),
                    # torch's 1F1B needs a micro-batch for every stage.
                    accumulation=mesh.pipeline if schedule == "1f1b" else 1,
                ),
            )
