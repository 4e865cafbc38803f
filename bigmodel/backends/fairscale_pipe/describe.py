"""Which plans fairscale's Pipe accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend
from bigmodel.backends.fairscale_pipe import shadow
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
class FairscalePipe(AbstractBackend):
    """GPipe in one process: a thread for every device. Only an `nn.Sequential`."""

    name = "fairscale_pipe"
    # Backend 'pipeline' has the same schedule, better ones, and takes more models.
    offered = False
    obeys = frozenset({"stages", "devices_per_process"})
    # Its threads do not inherit autocast.
    precisions = ("fp32", "bf16", "fp16")

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield several processes, and stages that are not one for every device."""
        yield from one_process_violations(plan, cluster)
        yield from stage_violations(plan, "gpipe")
        if any("." in unit for unit in plan.units):
            yield Violation(
                field="units",
                got=plan.units[0],
                rule="fairscale's Pipe takes an nn.Sequential, whose units are its "
                "children",
                cure="use backend 'pipeline' or 'naive'",
            )

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield one stage for every device."""
        count, units = costs.cluster.world, costs.model.units
        if 2 <= count <= len(units) and costs.cluster.num_nodes == 1:
            yield Plan(
                backend=self.name,
                devices_per_process=count,
                units=units,
                stages=Stages(schedule="gpipe", cuts=even_cuts(len(units), count)),
            )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the program of every device."""
        return shadow.programs(plan, costs, micro_batches)


BACKEND = FairscalePipe()
