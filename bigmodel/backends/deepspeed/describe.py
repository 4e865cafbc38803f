"""Which plans DeepSpeed's ZeRO accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from bigmodel.backends.backend import AbstractBackend
from bigmodel.backends.deepspeed import shadow
from bigmodel.backends.deepspeed.rules import offload_violations, option_violations
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import DeepSpeedOptions, Mesh, Plan
from bigmodel.simulator import Costs, Program


@final
class DeepSpeed(AbstractBackend):
    """ZeRO 1 shards optimizer states, 2 gradients too, 3 weights too."""

    name = "deepspeed"
    obeys = frozenset({"zero_stage", "deepspeed", "offload"})
    precisions = ("fp32", "bf16", "fp16", "autocast")

    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield other axes than `shard`, and what a stage does not have."""
        if plan.mesh.world != plan.mesh.shard:
            yield Violation(
                field="mesh",
                got=str(plan.mesh),
                rule="backend 'deepspeed' only shards",
                cure=f"use Mesh(shard={plan.mesh.world}), or another backend",
            )
        if plan.zero_stage == 0:
            yield Violation(
                field="zero_stage",
                got=0,
                rule="backend 'deepspeed' needs a ZeRO stage",
                cure="use 1, 2 or 3, or backend 'ddp'",
            )
        if plan.zero_stage == 3 and "selective" in plan.recompute:
            # `create_selective_checkpoint_contexts` matches the operators of both
            # forwards, and the hooks inside a block gather other weights in each.
            yield Violation(
                field="recompute",
                got="selective",
                rule="stage 3 gathers weights inside a block, other ones when it runs "
                "again, and torch's selective checkpoints expect the same operators",
                cure="use full or none, stages 1 or 2, or backend 'fsdp2'",
            )
        yield from option_violations(plan)
        yield from offload_violations(plan, model, cluster)

    def device_violations(self, plan: Plan, kind: str) -> Iterator[Violation]:
        """Yield what DeepSpeed has kernels of CUDA for."""
        if kind == "cuda":
            return
        for name in ("zero_quantized_weights", "zero_quantized_gradients"):
            if getattr(plan.deepspeed, name):
                yield Violation(
                    field=f"deepspeed.{name}",
                    got=True,
                    rule="DeepSpeed's quantizer is a kernel for CUDA; it has none for "
                    f"{kind}",
                    cure="leave it out, or run on GPUs",
                )

    def steps_parts(self, plan: Plan) -> bool:
        """Say that optimizers step flat partitions."""
        return True

    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield the three stages."""
        if costs.cluster.world > 1:
            elements = max(costs.model.trainable_elements, 1)
            # A bucket larger than the model only takes memory.
            default = DeepSpeedOptions().bucket_elements
            options = DeepSpeedOptions(bucket_elements=min(default, elements))
            for stage in (1, 2, 3):
                yield Plan(
                    backend=self.name,
                    mesh=Mesh(shard=costs.cluster.world),
                    units=costs.model.units,
                    zero_stage=stage,
                    deepspeed=options,
                )

    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's program."""
        return shadow.programs(plan, costs, micro_batches)


BACKEND = DeepSpeed()
