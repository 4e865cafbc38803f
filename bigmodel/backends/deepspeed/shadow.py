"""The step of a model that is trained with DeepSpeed's ZeRO.

Under stages 1 and 2 ranks differ in the gradients that they own: there is a program for
every kind of rank.
"""

from __future__ import annotations

from dataclasses import replace

from bigmodel.backends.deepspeed.modules import full_name
from bigmodel.backends.deepspeed.zero3 import ShardedZero
from bigmodel.backends.deepspeed.zero3_linear import without_weight_copies
from bigmodel.backends.flat_partition import FlatPartition
from bigmodel.backends.flat_zero import FlatZero
from bigmodel.backends.part import write_step
from bigmodel.backends.walk import Step, Walk, steps_of
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, Program, ProgramBuilder

APART = 8
"""Ranks up to which each is simulated by itself; a search has thousands of plans."""


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the programs of a step, one for every kind of rank.

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
    found: dict[Program, tuple[int, ...]] = {}
    for rank, same in partition.kinds(APART).items():
        builder = ProgramBuilder()
        walk = Walk(plan, costs, builder, steps)
        parts = FlatZero(plan, costs, builder, walk, partition, rank)
        program = write_step(parts, builder, micro_batches)
        found[program] = found.get(program, ()) + same
    return tuple(
        replace(program, ranks=tuple(sorted(ranks))) for program, ranks in found.items()
    )


def _partition(plan: Plan, steps: tuple[Step, ...]) -> FlatPartition:
    sizes = {
        full_name(step, param.name): param.elements
        for step in steps
        for param in step.owned
        if param.trainable
    }
    return FlatPartition(sizes, plan.mesh.shard)
