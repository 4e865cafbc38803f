"""What a plan needs at least, in closed form: it orders and prunes the search."""

from __future__ import annotations

from bigmodel.models import OPTIMIZERS
from bigmodel.plans import Plan
from bigmodel.simulator import Costs


class Bounds:
    """Lower bounds of time and memory of plans for one model on one cluster."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._seconds: dict[tuple, float] = {}
        self._states: dict[str, int] = {}

    def seconds(self, plan: Plan) -> float:
        """Return the seconds that computing alone takes.

        Without stages, all units for every micro-batch; with stages, the slowest stage
        for every micro-batch and the others once, to fill and to drain.
        """
        per_stage = [
            sum(
                self._unit(plan, index)
                for stage in plan.rank_stages(rank)
                for index in plan.stage_units(stage)
            )
            for rank in range(plan.mesh.pipeline)
        ]
        ends = self._ends(plan)
        last = owner_of_last(plan)
        per_stage[0] += ends[0]
        per_stage[last] += ends[1]
        if plan.num_stages > plan.mesh.pipeline:
            # Stages of one rank overlap with those of others even in one micro-batch.
            return plan.accumulation * max(per_stage)
        return sum(per_stage) + (plan.accumulation - 1) * max(per_stage)

    def memory(self, plan: Plan) -> int:
        """Return the bytes of weights and optimizer states on the average rank."""
        model = self._costs.model
        width = plan.number_format.weight_bytes
        states = self._state_bytes(plan.optimizer)
        masters = 4 * model.trainable_elements if width == 2 else 0
        weights = width * model.elements
        shard, stages = plan.mesh.shard, plan.mesh.pipeline
        if plan.stages is not None:
            # Stages of one process lie on its devices.
            stages *= plan.devices_per_process
        if plan.backend == "deepspeed":
            sharded = weights / shard if plan.zero_stage == 3 else weights
            return int(sharded + (states + masters) / shard)
        if plan.backend == "fsdp2" and plan.offload.parameters != "device":
            return 0
        if shard > 1:
            return int((4 * model.elements + states) / shard / stages)
        return int((weights + masters + states) / stages)

    def _state_bytes(self, optimizer: str) -> int:
        if optimizer not in self._states:
            row, shapes = OPTIMIZERS.get(optimizer), self._costs.model.trained_shapes
            self._states[optimizer] = 4 * row.kept_elements(shapes)
        return self._states[optimizer]

    def _unit(self, plan: Plan, index: int) -> float:
        unit = self._costs.model.blocks[index]
        policy = plan.recomputes(index)
        return self._of(unit, policy, plan.micro_batch)

    def _ends(self, plan: Plan) -> tuple[float, float]:
        model = self._costs.model
        return (
            self._of(model.before, "none", plan.micro_batch),
            self._of(model.after, "none", plan.micro_batch),
        )

    def _of(self, unit, policy: str, micro_batch: int) -> float:
        key = (id(unit), policy, micro_batch)
        if key not in self._seconds:
            self._seconds[key] = sum(
                segment.seconds
                for phase in ("forward", "backward")
                for segment in self._costs.segments(unit, policy, phase, micro_batch)
            )
        return self._seconds[key]


def owner_of_last(plan: Plan) -> int:
    """Return the pipeline rank that holds the last stage."""
    last = plan.num_stages - 1
    return next(r for r in range(plan.mesh.pipeline) if last in plan.rank_stages(r))
