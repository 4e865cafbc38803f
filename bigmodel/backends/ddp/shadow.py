"""The step of a model that is replicated with DistributedDataParallel."""

from __future__ import annotations

from bigmodel.backends.part import write_step
from bigmodel.backends.replicas import Replica
from bigmodel.backends.walk import Walk, steps_of
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, Program, ProgramBuilder


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the program of every rank's step.

    Args:
        plan: A plan of backend `ddp`.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    builder = ProgramBuilder()
    steps = steps_of(plan, costs.model.sequence)
    replica = Replica(plan, costs, builder, Walk(plan, costs, builder, steps))
    return (write_step(replica, builder, micro_batches),)
