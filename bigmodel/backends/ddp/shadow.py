"""The step of a model that is replicated with DistributedDataParallel.

With ZeRO-1 the ranks differ: torch's ZeroRedundancyOptimizer (2.13, `torch/distributed/
optim/zero_redundancy_optimizer.py`) deals out parameters, largest first, each to the
rank that has the fewest elements so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigmodel.backends.part import write_step
from bigmodel.backends.replicas import Replica
from bigmodel.backends.walk import Walk, steps_of, trainable
from bigmodel.models import Param
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, Program, ProgramBuilder


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the program of every rank's step, or of every kind of rank.

    Args:
        plan: A plan of backend `ddp`.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    steps = steps_of(plan, costs.model.sequence)
    if not plan.zero_stage:
        builder = ProgramBuilder()
        replica = Replica(plan, costs, builder, Walk(plan, costs, builder, steps))
        return (write_step(replica, builder, micro_batches),)
    parts = deal(trainable(steps), plan.mesh.replicate)
    alike: dict[tuple[int, int], list[int]] = {}
    for rank, part in enumerate(parts):
        sizes = [param.elements for param in part]
        alike.setdefault((sum(sizes), max(sizes, default=0)), []).append(rank)
    written = []
    for ranks in alike.values():
        builder = ProgramBuilder(tuple(ranks))
        walk = Walk(plan, costs, builder, steps)
        replica = Replica(plan, costs, builder, walk, parts[ranks[0]])
        written.append(write_step(replica, builder, micro_batches))
    return tuple(written)


def deal(params: Sequence[Param], ranks: int) -> list[list[Param]]:
    """Deal parameters to ranks, largest first, each to the emptiest rank."""
    parts: list[list[Param]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for param in sorted(params, key=lambda param: -param.elements):
        rank = sizes.index(min(sizes))
        parts[rank].append(param)
        sizes[rank] += param.elements
    return parts
