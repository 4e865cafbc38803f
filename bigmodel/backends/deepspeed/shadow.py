"""The step of a model that is trained with DeepSpeed's ZeRO.

Under stages 1 and 2 ranks differ in the gradients that they own; the program is that of
the fullest rank.
"""

from __future__ import annotations

from bigmodel.backends.deepspeed.flat_partition import FlatPartition
from bigmodel.backends.deepspeed.modules import full_name
from bigmodel.backends.deepspeed.zero3 import ShardedZero
from bigmodel.backends.deepspeed.zero3_linear import without_weight_copies
from bigmodel.backends.deepspeed.zero12 import FlatZero
from bigmodel.backends.part import write_step
from bigmodel.backends.walk import Step, Walk, steps_of
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, Program, ProgramBuilder, simulate


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the program of the fullest rank's step.

    Args:
        plan: A plan of backend `deepspeed`.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    steps = steps_of(plan, costs.model.sequence)
    if plan.zero_stage == 3:
        builder = ProgramBuilder()
        walk = Walk(plan, costs, builder, steps)
        parts = ShardedZero(plan, costs, builder, walk)
        program = write_step(parts, builder, micro_batches)
        if plan.number_format.autocast:
            program = without_weight_copies(program, steps)
        return (program,)
    partition = _partition(plan, steps)
    candidates = []
    # The one that holds most, and the one that holds it earliest in a backward.
    for rank in sorted({partition.heaviest, partition.last}):
        builder = ProgramBuilder()
        walk = Walk(plan, costs, builder, steps)
        parts = FlatZero(plan, costs, builder, walk, partition, rank)
        candidates.append(write_step(parts, builder, micro_batches))
    return (max(candidates, key=_peak_bytes),)


def _partition(plan: Plan, steps: tuple[Step, ...]) -> FlatPartition:
    sizes = {
        full_name(step, param.name): param.elements
        for step in steps
        for param in step.owned
        if param.trainable
    }
    return FlatPartition(sizes, plan.mesh.shard)


def _peak_bytes(program: Program) -> int:
    return simulate((program,))[0].peak.num_bytes
