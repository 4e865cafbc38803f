"""Which plans `fully_shard` accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend, divisors
from bigmodel.backends.fsdp2 import shadow
from bigmodel.backends.fsdp2.rules import ignored_violations, offload_violations
from bigmodel.backends.sharding_rules import sharding_violations
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Fsdp2Options, Mesh, Offload, Plan
from bigmodel.simulator import Costs, Program


@final
class Fsdp2(AbstractBackend):
    """Everything is sharded; weights are gathered block by block."""

    name = "fsdp2"
    obeys = frozenset({"fsdp2", "offload", "compile"})
    fills_from_first_rank = True

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield stages, offloading by halves, and modules that cannot be ignored."""
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
        yield from sharding_violations(plan)
        yield from offload_violations(plan, model, cluster)
        yield from ignored_violations(plan, model)

    def steps_parts(self, plan: Plan) -> bool:
        """Say that optimizers step DTensors, of which adafactor takes none."""
        return True

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield full sharding and every hybrid, resharding or not, and offloading."""
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
        if world > 1 and costs.cluster.device.kind == "cuda":
            yield Plan(
                backend=self.name,
                mesh=Mesh(shard=world),
                units=costs.model.units,
                offload=Offload(parameters="cpu", optimizer="cpu"),
            )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's program."""
        return shadow.programs(plan, costs, micro_batches)


BACKEND = Fsdp2()
