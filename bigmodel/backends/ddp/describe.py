"""Which plans DistributedDataParallel accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend
from bigmodel.backends.ddp import shadow
from bigmodel.backends.offload_rules import activation_offload_violations
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Mesh, Plan
from bigmodel.simulator import Costs, Program


@final
class Ddp(AbstractBackend):
    """Whole copies of the model; gradients are averaged in buckets."""

    name = "ddp"
    obeys = frozenset({"ddp", "zero_stage", "offload", "compile"})

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield the axes that DDP cannot split."""
        yield from activation_offload_violations(plan)
        if plan.mesh.world != plan.mesh.replicate:
            yield Violation(
                field="mesh",
                got=str(plan.mesh),
                rule="backend 'ddp' only replicates",
                cure=f"use Mesh(replicate={plan.mesh.world}), or another backend",
            )

        if plan.zero_stage > 1:
            yield Violation(
                field="zero_stage",
                got=plan.zero_stage,
                rule="backend 'ddp' shards optimizer states only: stage 1, by torch's "
                "ZeroRedundancyOptimizer",
                cure="use backend 'deepspeed' or 'fsdp2'",
            )
        if plan.ddp.static_graph and plan.accumulation > 1:
            yield Violation(
                field="ddp.static_graph",
                got=True,
                rule="torch 2.13 stops with an internal error, or reduces nothing, "
                "when a static graph skips the reduction of a micro-batch",
                cure="use accumulation 1, or find_unused in place of static_graph",
            )

    def device_violations(self, plan: Plan, kind: str) -> Iterator[Violation]:
        """Yield the hook that needs NCCL."""
        if plan.ddp.hook == "bf16" and kind == "cpu":
            yield Violation(
                field="ddp.hook",
                got="bf16",
                rule="torch's bf16 hook needs NCCL, and these devices are CPUs",
                cure="use hook fp16",
            )

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield replicas, and replicas with sharded optimizer states."""
        world = costs.cluster.world
        for zero_stage in (0, 1) if world > 1 else (0,):
            yield Plan(
                backend=self.name,
                mesh=Mesh(replicate=world),
                units=costs.model.units,
                zero_stage=zero_stage,
            )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's program."""
        return shadow.programs(plan, costs, micro_batches)


BACKEND = Ddp()
