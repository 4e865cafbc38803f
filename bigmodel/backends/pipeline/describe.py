"""Which plans torch's pipeline stages accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend, divisors
from bigmodel.backends.balance import balanced_cuts
from bigmodel.backends.pipeline import shadow
from bigmodel.backends.sharding_rules import stage_violations
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.schedules import SCHEDULES
from bigmodel.simulator import Costs, Program

_STAGES_ON_A_RANK = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "interleaved-zb": 2,
    "zbv": 2,
    "dualpipev": 2,
}
"""How many stages a rank has in the plans that the search is offered."""


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
            yield from _split_violations(plan, model)
            yield from _tie_violations(plan, model)
        yield from stage_violations(plan)
        if model is not None:
            yield from _cut_violations(plan, model)

    def steps_parts(self, plan: Plan) -> bool:
        """Say whether stages are sharded with FSDP2."""
        return plan.mesh.shard > 1

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield every number of stages, with DDP or FSDP2 inside."""
        world, most = costs.cluster.world, len(costs.model.cuts) + 1
        for count in divisors(world):
            if not 2 <= count <= most:
                continue
            inside = world // count
            meshes = [Mesh(pipeline=count, replicate=inside)]
            if inside > 1:
                meshes.append(Mesh(pipeline=count, shard=inside))
            cuts = {
                laps: balanced_cuts(costs, laps * count)
                for laps in (1, 2)
                if laps * count <= most
            }
            for mesh in meshes:
                for schedule, laps in _STAGES_ON_A_RANK.items():
                    splits = SCHEDULES.get(schedule).splits_backward
                    possible = costs.model.splits and mesh.data_parallel == 1
                    if laps not in cuts or (splits and not possible):
                        continue
                    yield Plan(
                        backend=self.name,
                        mesh=mesh,
                        units=costs.model.units,
                        stages=Stages(schedule=schedule, cuts=cuts[laps]),
                    )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's programs."""
        return shadow.programs(plan, costs, micro_batches)


def _cut_violations(plan: Plan, model: ModelSpec) -> Iterator[Violation]:
    """Yield a model that cannot be cut at all, or not where the plan does."""
    if not model.cuts:
        yield Violation(
            field="model",
            got=model.name,
            rule=f"it cannot be cut into stages: {model.uncuttable}",
            cure="use backend 'fsdp2' or 'deepspeed'",
        )
    elif plan.stages and not set(plan.stages.cuts) <= set(model.cuts):
        yield Violation(
            field="stages.cuts",
            got=plan.stages.cuts,
            rule=f"{model.name} can be cut before blocks {_ranges(model.cuts)} only: "
            f"{model.uncuttable}",
            cure="move the cuts, or use backend 'fsdp2' or 'deepspeed'",
        )


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return increasing numbers in short: `1 to 5, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs
    )


def _split_violations(plan: Plan, model: ModelSpec | None) -> Iterator[Violation]:
    """Yield what does not go with a backward in two parts."""
    schedule = plan.stages.schedule if plan.stages else ""
    if not SCHEDULES.get(schedule).splits_backward:
        return
    cure = "use schedule 'interleaved' or '1f1b'"
    if model is not None and model.cuts and not model.splits:
        yield Violation(
            field="stages.schedule",
            got=schedule,
            rule=f"torch cannot run the backward of {model.name} in two parts",
            cure=cure,
        )
    if plan.mesh.data_parallel > 1:
        # Seen on a chain of blocks with residuals, torch 2.13: weights 0.2 off after
        # one step of SGD, under DDP and under FSDP2.
        yield Violation(
            field="stages.schedule",
            got=schedule,
            rule=f"with {plan.mesh.data_parallel} data-parallel ranks in each stage it "
            "would train wrongly: torch sets gradients of weights past the hooks by "
            "which DDP and FSDP2 reduce them",
            cure=cure,
        )
    if plan.recomputed:
        yield Violation(
            field="recompute",
            got=next(policy for policy in plan.recompute if policy != "none"),
            rule=f"under schedule {schedule!r} torch would run a block's forward again "
            "for every operator with weights that it holds, not once",
            cure=f"recompute nothing, or {cure}",
        )


def _tie_violations(plan: Plan, model: ModelSpec | None) -> Iterator[Violation]:
    """Yield a weight that two replicated or sharded stages of one rank share."""
    if model is None or plan.stages is None or plan.mesh.data_parallel == 1:
        return
    ends = {0, plan.num_stages - 1}
    both = any(ends <= set(plan.rank_stages(r)) for r in range(plan.mesh.pipeline))
    tied = next((p.name for p in model.after.params if p.tied_to is not None), None)
    if both and tied is not None:
        yield Violation(
            field="stages.schedule",
            got=plan.stages.schedule,
            rule=f"the first and the last stage share {tied} and a rank, and each "
            "would average its gradient over the data-parallel ranks by itself",
            cure="use 1f1b or interleaved, or a mesh of pipeline stages alone",
        )


BACKEND = Pipeline()
