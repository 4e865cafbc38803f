"""Which plans Horovod accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend
from bigmodel.backends.horovod import shadow
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Mesh, Plan
from bigmodel.simulator import Costs, Program


@final
class Horovod(AbstractBackend):
    """Whole copies of the model; gradients are averaged through one fusion buffer.

    Chosen by name only: its last release (0.28.1) does not build against torch 2.13 as
    it is, so a plan for it would not run on most machines.
    """

    name = "horovod"
    offered = False
    obeys = frozenset({"horovod"})
    # It averages the gradients of the parameters that its optimizer steps, so masters
    # would be averaged in fp32 after the backward; and 0.28.1 has no bfloat16.
    precisions = ("fp32", "autocast", "autocast-fp16")

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield the axes that Horovod cannot split."""
        if plan.mesh.world != plan.mesh.replicate:
            yield Violation(
                field="mesh",
                got=str(plan.mesh),
                rule="backend 'horovod' only replicates",
                cure=f"use Mesh(replicate={plan.mesh.world}), or another backend",
            )

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield replicas, where there is more than one device."""
        if costs.cluster.world > 1:
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


BACKEND = Horovod()
