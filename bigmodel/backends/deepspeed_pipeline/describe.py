"""Which plans DeepSpeed's pipeline engine accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import final

from bigmodel.backends.backend import AbstractBackend, divisors
from bigmodel.backends.balance import balanced_cuts
from bigmodel.backends.deepspeed_pipeline import shadow
from bigmodel.backends.stage_units import stage_sequence
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import DeepSpeedOptions, Mesh, Plan, Stages
from bigmodel.simulator import Costs, Program


@final
class DeepSpeedPipeline(AbstractBackend):
    """1F1B over an `nn.Sequential`; data parallel within a stage, or ZeRO-1."""

    name = "deepspeed_pipeline"
    # Backend 'pipeline' has the same schedule, better ones, and takes more models.
    offered = False
    # DeepSpeed writes a file for every layer, under its number.
    shares_checkpoints = False
    obeys = frozenset({"stages", "zero_stage", "deepspeed"})
    precisions = ("fp32", "bf16", "fp16", "autocast")

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield other stages, meshes and models than the engine has."""
        if plan.stages is None or plan.mesh.pipeline < 2:
            yield Violation(
                field="mesh.pipeline",
                got=plan.mesh.pipeline,
                rule="backend 'deepspeed_pipeline' needs at least 2 stages",
                cure="set Mesh(pipeline=2) and stages=Stages(schedule='1f1b', ...), or "
                "use backend 'deepspeed'",
            )
            return
        if plan.stages.schedule != "1f1b":
            yield Violation(
                field="stages.schedule",
                got=plan.stages.schedule,
                rule="DeepSpeed's pipeline engine runs '1f1b'",
                cure="use '1f1b', or backend 'pipeline'",
            )
        if plan.precision == "autocast" and plan.num_stages > 2:
            # `_allocate_or_extend_buffers`: element types are not looked at.
            yield Violation(
                field="precision",
                got="autocast",
                rule="DeepSpeed's engine receives hidden states and gradients of a "
                "stage between two others in one buffer, of whatever type the first "
                "was, and under autocast their types may differ",
                cure="use 2 stages, bf16 or fp32, or backend 'pipeline'",
            )
        yield from _zero_violations(plan)
        yield from _option_violations(plan)
        if any("." in unit for unit in plan.units):
            yield Violation(
                field="units",
                got=plan.units[0],
                rule="DeepSpeed's pipeline takes a row of layers that each hand one "
                "tensor on: an nn.Sequential, whose units are its children",
                cure="use backend 'pipeline', 'fsdp2' or 'deepspeed'",
            )
        elif model is not None:
            yield from _model_violations(plan, model)

    def steps_parts(self, plan: Plan) -> bool:
        """Say whether the engine makes flat partitions: under ZeRO, and in 16 bits."""
        return bool(plan.zero_stage) or plan.number_format.masters

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield every number of stages, with data parallelism or ZeRO-1 inside."""
        world, units = costs.cluster.world, costs.model.units
        elements = max(costs.model.trainable_elements, 1)
        # A bucket larger than the model only takes memory.
        default = DeepSpeedOptions().bucket_elements
        options = DeepSpeedOptions(bucket_elements=min(default, elements))
        for count in divisors(world):
            if not 2 <= count <= len(costs.model.cuts) + 1:
                continue
            inside = world // count
            stages = Stages(schedule="1f1b", cuts=balanced_cuts(costs, count))
            yield Plan(
                backend=self.name,
                mesh=Mesh(pipeline=count, replicate=inside),
                units=units,
                stages=stages,
            )
            yield Plan(
                backend=self.name,
                mesh=Mesh(pipeline=count, shard=inside),
                units=units,
                stages=stages,
                zero_stage=1,
                deepspeed=options,
            )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's programs."""
        return shadow.programs(plan, costs, micro_batches)


def _zero_violations(plan: Plan) -> Iterator[Violation]:
    """Yield stages of ZeRO, and axes of the mesh, that do not go with a pipeline."""
    name = plan.backend
    if plan.zero_stage > 1:
        yield Violation(
            field="zero_stage",
            got=plan.zero_stage,
            rule="with pipeline stages DeepSpeed has ZeRO 1 only: from stage 2 on "
            "gradients are sharded as they come, and every micro-batch of a pipeline "
            "would reduce them",
            cure="use zero_stage=1 with the pipeline, or backend 'deepspeed' without",
        )
    elif plan.zero_stage == 1 and plan.mesh.replicate > 1:
        yield Violation(
            field="mesh.replicate",
            got=plan.mesh.replicate,
            rule="ZeRO 1 shards the optimizer's states over all data-parallel ranks",
            cure=f"use shard={plan.mesh.data_parallel} and replicate=1",
        )
    elif plan.zero_stage == 0 and plan.mesh.shard > 1:
        yield Violation(
            field="mesh.shard",
            got=plan.mesh.shard,
            rule=f"backend {name!r} shards nothing without ZeRO",
            cure=f"use zero_stage=1, or replicate={plan.mesh.data_parallel}",
        )
    if plan.number_format.masters and plan.zero_stage == 0:
        yield Violation(
            field="zero_stage",
            got=0,
            rule=f"in {plan.precision} without ZeRO DeepSpeed takes other optimizers "
            "for pipelines, which shard bf16's masters all the same or keep a norm for "
            "each stage",
            cure="use zero_stage=1; with one data-parallel rank nothing is sharded",
        )


def _option_violations(plan: Plan) -> Iterator[Violation]:
    """Yield options of DeepSpeed without effect on its pipeline."""
    for entry in fields(DeepSpeedOptions):
        value = getattr(plan.deepspeed, entry.name)
        has_effect = entry.name == "bucket_elements" and plan.zero_stage == 1
        if value != entry.default and not has_effect:
            yield Violation(
                field=f"deepspeed.{entry.name}",
                got=value,
                rule="it would have no effect: the pipeline engine reduces gradients "
                "once, after the last backward, in the type of the weights",
                cure="leave it at its default",
            )


def _model_violations(plan: Plan, model: ModelSpec) -> Iterator[Violation]:
    for stage in range(plan.num_stages):
        held = stage_sequence(plan, model, stage)
        if not any(p.trainable for placed in held for p in placed.unit.params):
            yield Violation(
                field="stages.cuts",
                got=f"stage {stage} of {plan.num_stages}",
                rule="DeepSpeed's pipeline engine needs something to train in every "
                "stage, and this one has nothing",
                cure="cut elsewhere, or use backend 'pipeline'",
            )


BACKEND = DeepSpeedPipeline()
