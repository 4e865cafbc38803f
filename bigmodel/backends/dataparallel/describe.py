"""Which plans torch.nn.DataParallel accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend
from bigmodel.backends.dataparallel import shadow
from bigmodel.backends.one_process_rules import one_process_violations
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, Program


@final
class DataParallel(AbstractBackend):
    """The first device keeps all; the others are given copies for one forward."""

    name = "dataparallel"
    # DDP does the same without copying weights in every forward.
    offered = False
    obeys = frozenset({"devices_per_process"})

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield several processes, and micro-batches that do not divide."""
        yield from one_process_violations(plan, cluster)
        if plan.micro_batch % plan.devices_per_process:
            yield Violation(
                field="micro_batch",
                got=plan.micro_batch,
                rule=f"its samples are dealt to {plan.devices_per_process} devices, "
                "and the mean of their means is the loss only if each gets as many",
                cure=f"use a multiple of {plan.devices_per_process}",
            )

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield a copy on every device."""
        if costs.cluster.world > 1 and costs.cluster.num_nodes == 1:
            yield Plan(
                backend=self.name,
                devices_per_process=costs.cluster.world,
                units=costs.model.units,
            )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the program of the first device, and that of the others."""
        return shadow.programs(plan, costs, micro_batches)


BACKEND = DataParallel()
