"""Which plans naive model parallel accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend
from bigmodel.backends.naive import shadow
from bigmodel.backends.offload_rules import activation_offload_violations
from bigmodel.backends.one_process_rules import (
    even_cuts,
    one_process_violations,
    stage_violations,
)
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Plan, Stages
from bigmodel.simulator import Costs, Program


@final
class Naive(AbstractBackend):
    """One process deals layers to its devices; one device works at a time."""

    name = "naive"
    # All devices but one wait: a pipeline of the same stages is faster.
    offered = False
    obeys = frozenset({"stages", "devices_per_process", "offload"})

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield several processes, and stages that are not one for every device."""
        yield from activation_offload_violations(plan)
        yield from one_process_violations(plan, cluster)
        yield from stage_violations(plan, "naive")

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield one stage for every device."""
        count, units = costs.cluster.world, costs.model.units
        if 2 <= count <= len(units) and costs.cluster.num_nodes == 1:
            yield Plan(
                backend=self.name,
                devices_per_process=count,
                units=units,
                stages=Stages(schedule="naive", cuts=even_cuts(len(units), count)),
            )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the program of every device."""
        return shadow.programs(plan, costs, micro_batches)


BACKEND = Naive()
