"""Which plans fairscale accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend
from bigmodel.backends.fairscale import shadow
from bigmodel.backends.offload_rules import activation_offload_violations
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import FairscaleOptions, Mesh, Plan
from bigmodel.simulator import Costs, Program


@final
class Fairscale(AbstractBackend):
    """`OSS` shards optimizer states; with `ShardedDataParallel` gradients too."""

    name = "fairscale"
    offered = False
    obeys = frozenset({"zero_stage", "fairscale", "offload"})
    # OSS steps the weights that compute, so there is no place for masters.
    precisions = ("fp32", "autocast", "autocast-fp16")

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield other axes than `shard`, and stages that it does not have."""
        yield from activation_offload_violations(plan)
        if plan.mesh.world != plan.mesh.shard:
            yield Violation(
                field="mesh",
                got=str(plan.mesh),
                rule="backend 'fairscale' only shards",
                cure=f"use Mesh(shard={plan.mesh.world}), or another backend",
            )
        if plan.zero_stage not in (1, 2):
            yield Violation(
                field="zero_stage",
                got=plan.zero_stage,
                rule="backend 'fairscale' runs stages 1 (OSS) and 2 "
                "(ShardedDataParallel); its FullyShardedDataParallel needs CUDA "
                "streams and the internals of torch before 2",
                cure="use backend 'fsdp2', its successor in torch, or 'deepspeed'",
            )
        yield from _option_violations(plan)

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield both stages."""
        if costs.cluster.world > 1:
            for stage in (1, 2):
                yield Plan(
                    backend=self.name,
                    mesh=Mesh(shard=costs.cluster.world),
                    units=costs.model.units,
                    zero_stage=stage,
                )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's programs."""
        return shadow.programs(plan, costs, micro_batches)


def _option_violations(plan: Plan) -> Iterator[Violation]:
    options, default = plan.fairscale, FairscaleOptions()
    unlike = options.reduce_buffer_elements != default.reduce_buffer_elements
    if plan.zero_stage == 1 and unlike:
        yield Violation(
            field="fairscale.reduce_buffer_elements",
            got=options.reduce_buffer_elements,
            rule="it is an option of ShardedDataParallel, that is of stage 2",
            cure="leave it at its default",
        )
    if plan.zero_stage == 2 and options.adascale:
        yield Violation(
            field="fairscale.adascale",
            got=True,
            rule="AdaScale reads all averaged gradients on every rank, and under stage "
            "2 each rank has its own only",
            cure="use zero_stage=1",
        )
    if options.adascale and plan.number_format.scaled:
        yield Violation(
            field="fairscale.adascale",
            got=True,
            rule="it compares squares of gradients, which a loss scale changes from "
            "step to step",
            cure="use precision 'autocast'",
        )


BACKEND = Fairscale()
