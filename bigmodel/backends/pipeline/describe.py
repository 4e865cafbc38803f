"""Which plans torch's pipeline stages accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend, divisors
from bigmodel.backends.pipeline import shadow
from bigmodel.backends.pipeline.balance import balanced_cuts
from bigmodel.backends.sharding_rules import stage_violations
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.schedules import SCHEDULES
from bigmodel.simulator import Costs, Program

_ONE_STAGE = ("gpipe", "1f1b")
"""Schedules with one stage on a rank. Those that split the backward are not offered to
the search: what torch keeps between its parts is not simulated yet."""


@final
class Pipeline(AbstractBackend):
    """The model is cut into stages; within a stage DDP or FSDP2."""

    name = "pipeline"
    obeys = frozenset({"stages", "ddp", "fsdp2"})

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield missing stages, unknown schedules, and models that cannot be cut."""
        if plan.stages is None or plan.mesh.pipeline < 2:
            yield Violation(
                field="mesh.pipeline",
                got=plan.mesh.pipeline,
                rule="backend 'pipeline' needs at least 2 stages",
                cure="set Mesh(pipeline=2) and stages=Stages(...), or use another "
                "backend",
            )
            return
        schedule = plan.stages.schedule
        if schedule not in SCHEDULES:
            yield Violation(
                field="stages.schedule",
                got=schedule,
                rule=f"known schedules: {', '.join(SCHEDULES.names())}",
            )
        else:
            refusal = SCHEDULES.get(schedule).refusal(
                plan.mesh.pipeline, plan.num_stages, plan.accumulation
            )
            if refusal:
                yield Violation(
                    field="accumulation",
                    got=plan.accumulation,
                    rule=f"of schedule {schedule!r} {refusal}",
                    cure="use schedule 'gpipe', or another micro-batch",
                )
        yield from stage_violations(plan)
        splits = schedule in SCHEDULES and SCHEDULES.get(schedule).splits_backward
        if splits and plan.mesh.data_parallel > 1:
            yield Violation(
                field="stages.schedule",
                got=schedule,
                rule="it makes gradients of weights apart from those of inputs, and "
                "torch 2.13 does not average them over data-parallel ranks",
                cure="use 1f1b or interleaved, or a mesh of pipeline stages alone",
            )
        if model is not None and model.uncuttable:
            yield Violation(
                field="model",
                got=model.name,
                rule=f"it cannot be cut into stages: {model.uncuttable}",
                cure="use backend 'fsdp2' or 'deepspeed'",
            )

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield every number of stages, with DDP or FSDP2 inside."""
        world, units = costs.cluster.world, len(costs.model.units)
        for count in divisors(world):
            if not 2 <= count <= units:
                continue
            inside = world // count
            meshes = [Mesh(pipeline=count, replicate=inside)]
            if inside > 1:
                meshes.append(Mesh(pipeline=count, shard=inside))
            ways = {schedule: balanced_cuts(costs, count) for schedule in _ONE_STAGE}
            if 2 * count <= units:
                ways["interleaved"] = balanced_cuts(costs, 2 * count)
            for mesh in meshes:
                for schedule, cuts in ways.items():
                    stages = Stages(schedule=schedule, cuts=cuts)
                    yield Plan(
                        backend=self.name,
                        mesh=mesh,
                        units=costs.model.units,
                        stages=stages,
                    )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's programs."""
        return shadow.programs(plan, costs, micro_batches)


BACKEND = Pipeline()
