"""Which plans `fully_shard` accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend, divisors
from bigmodel.backends.fsdp2 import shadow
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Fsdp2Options, Mesh, Plan
from bigmodel.simulator import Costs, Program


@final
class Fsdp2(AbstractBackend):
    """Everything is sharded; weights are gathered block by block."""

    name = "fsdp2"
    obeys = frozenset({"fsdp2"})

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield stages, which are the pipeline's business."""
        if plan.mesh.pipeline > 1:
            yield Violation(
                field="mesh.pipeline",
                got=plan.mesh.pipeline,
                rule="backend 'fsdp2' has no pipeline stages",
                cure="use backend 'pipeline', which shards within stages",
            )
        if plan.mesh.shard == 1 and plan.mesh.world > 1:
            yield Violation(
                field="mesh.shard",
                got=1,
                rule="backend 'fsdp2' shards; there is nothing to shard among 1 rank",
                cure="use backend 'ddp'",
            )

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield full sharding and every hybrid, resharding or not."""
        world = costs.cluster.world
        for shard in divisors(world)[1:]:
            mesh = Mesh(replicate=world // shard, shard=shard)
            for reshard in (True, False):
                yield Plan(
                    backend=self.name,
                    mesh=mesh,
                    units=costs.model.units,
                    fsdp2=Fsdp2Options(reshard_after_forward=reshard),
                )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's program."""
        return shadow.programs(plan, costs, micro_batches)


BACKEND = Fsdp2()
