"""The step of a model that is trained with fairscale's ZeRO-1 or ZeRO-2.

Source: fairscale 0.4.13, `fairscale/optim/oss.py` and `fairscale/nn/data_parallel/
sharded_ddp.py`. OSS deals out parameters in their order, each to the rank that has the
fewest elements so far. ShardedDataParallel makes one bucket for every rank; a gradient
that finds room in it, smallest first, is a view of it for ever, so buckets of all ranks
stay on each. The others come and go as in any backward, and are dropped once they have
been sent, but on the rank that steps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from bigmodel.backends.part import AbstractPart, write_step
from bigmodel.backends.replicas import Replica
from bigmodel.backends.stepping import hold_states, step_task
from bigmodel.backends.walk import (
    BUCKETS,
    GRADIENTS,
    Walk,
    communication,
    hold_inputs,
    hold_weights,
    steps_of,
    trainable,
)
from bigmodel.clusters import group
from bigmodel.models import Gradient, Param
from bigmodel.plans import Mesh, Plan
from bigmodel.simulator import Costs, Program, ProgramBuilder, Task

WIDTH = 4
"""Bytes of an element: weights and gradients are in fp32."""


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the program of every kind of rank.

    Args:
        plan: A plan of backend `fairscale`.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    steps = steps_of(plan, costs.model.sequence)
    parts = deal(trainable(steps), plan.mesh.shard)
    # In stage 1 DDP holds the gradients, of as many replicas.
    replicated = replace(plan, mesh=Mesh(replicate=plan.mesh.shard))
    written = []
    for rank, part in enumerate(parts):
        builder = ProgramBuilder((rank,))
        walk = Walk(plan, costs, builder, steps)
        holder: AbstractPart = (
            Replica(
                replicated,
                costs,
                builder,
                walk,
                part,
                squares=plan.fairscale.adascale,
            )
            if plan.zero_stage == 1
            else ReducedToOwner(plan, costs, builder, walk, parts, rank)
        )
        written.append(write_step(holder, builder, micro_batches))
    return tuple(written)


def deal(params: Sequence[Param], ranks: int) -> list[list[Param]]:
    """Deal parameters to ranks in their order, each to the emptiest rank."""
    parts: list[list[Param]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for param in params:
        rank = sizes.index(min(sizes))
        parts[rank].append(param)
        sizes[rank] += param.elements
    return parts


def unbucketed(part: Sequence[Param], capacity: int) -> list[Param]:
    """Return the parameters of one rank that find no room in its bucket."""
    filled, left = 0, []
    for param in sorted(part, key=lambda param: param.elements):
        if filled + param.elements < capacity:
            filled += param.elements
        else:
            left.append(param)
    return left


@final
class ReducedToOwner(AbstractPart):
    """A whole model whose gradients are reduced to the rank that steps them.

    Args:
        plan: The plan.
        costs: Of the model on the cluster.
        builder: The program that is written.
        walk: The units of this rank.
        parts: The parameters that each rank steps.
        rank: This one.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        builder: ProgramBuilder,
        walk: Walk,
        parts: Sequence[Sequence[Param]],
        rank: int,
    ) -> None:
        self.walk = walk
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._trained = trainable(walk.steps)
        self._elements = sum(p.elements for p in self._trained)
        self._own = parts[rank]
        self._group = group(costs.cluster, plan.mesh.shard)
        whole = sum(step.elements for step in walk.steps)
        capacity = min(plan.fairscale.reduce_buffer_elements, whole)
        alone = [unbucketed(part, capacity) for part in parts]
        self._alone = sum(p.elements for part in alone for p in part) * WIDTH
        self._alone_own = sum(p.elements for p in alone[rank]) * WIDTH
        # Of gradients of one size some may be in a bucket and others not: by share.
        sizes = {p.elements for part in alone for p in part}
        self._sizes_alone = sizes
        self._accumulated = False
        hold_weights(builder, plan, walk.steps)
        hold_states(builder, plan, [p.shape for p in self._own])
        builder.hold(
            BUCKETS,
            self._elements * WIDTH - self._alone,
            [
                WIDTH * (sum(p.elements for p in part) - sum(p.elements for p in left))
                for part, left in zip(parts, alone, strict=True)
            ],
        )
        hold_inputs(builder, costs, plan, walk.steps)

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        self.walk.forward(f"micro-batch {index}")

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch; the last one reduces the gradients."""

        def on_gradients(gradients: tuple[Gradient, ...], task: int) -> None:
            for gradient in gradients:
                stays = gradient.elements in self._sizes_alone
                if not stays or self._accumulated:
                    self._builder.allocate(
                        GRADIENTS, -gradient.elements * WIDTH, "add to gradient"
                    )

        self.walk.backward(f"micro-batch {index}", on_gradients=on_gradients)
        self._accumulated = True
        if last:
            self._builder.add(
                Task(
                    label="reduce gradients to their owners",
                    stream=communication(self._costs),
                    seconds=self._group.gather(self._elements * WIDTH),
                    after=(self._builder.last,),
                )
            )
            others = self._alone - self._alone_own
            self._builder.allocate(GRADIENTS, -others, "drop gradients of others")

    def update(self) -> None:
        """Write the optimizer's step, its broadcast, and the end of the gradients."""
        builder, costs = self._builder, self._costs
        builder.add(step_task(self._plan, costs, [p.shape for p in self._own]))
        builder.add(
            Task(
                label="broadcast stepped weights",
                stream=communication(costs),
                seconds=self._group.gather(self._elements * WIDTH),
                after=(builder.last,),
            )
        )
        builder.allocate(GRADIENTS, -self._alone_own, "drop gradients")
