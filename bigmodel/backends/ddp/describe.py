"""Which plans DistributedDataParallel accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend
from bigmodel.backends.ddp import shadow
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Mesh, Plan
from bigmodel.simulator import Costs, Program


@final
class Ddp(AbstractBackend):
    """Whole copies of the model; gradients are averaged in buckets."""

    name = "ddp"
    obeys = frozenset({"ddp"})

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield the axes that DDP cannot split."""
        if plan.mesh.world != plan.mesh.replicate:
            yield Violation(
                field="mesh",
                got=str(plan.mesh),
                rule="backend 'ddp' only replicates",
                cure=f"use Mesh(replicate={plan.mesh.world}), or another backend",
            )

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield the one layout there is."""
        yield Plan(
            backend=self.name,
            mesh=Mesh(replicate=costs.cluster.world),
            units=costs.model.units,
        )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's program."""
        return shadow.programs(plan, costs, micro_batches)


BACKEND = Ddp()
