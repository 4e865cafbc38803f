"""What `fully_shard` does to memory and time.

Source: torch 2.13, `torch/distributed/fsdp/_fully_shard/`. Every block is a group, the
rest of the model is the root group. For a group of u bytes of unsharded weights:

    forward    all-gather output u, copied out into unsharded weights u; the output is
               kept until the next group has copied out (implicit prefetch)
    backward   the next group's all-gather output is already there; gradients u; at the
               end the weights go, a reduce-scatter input (u in the reduce type) comes
               and stays until the next group's, and a shard of gradients remains

The root's weights stay gathered from forward to backward, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from bigmodel.backends.walk import (
    BUCKETS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    STEP,
    WEIGHTS,
    Step,
    Walk,
    communication,
    hold_inputs,
    optimizer_state_bytes,
    scratch,
    step_seconds,
    step_surge,
    steps_of,
    weight_bytes,
)
from bigmodel.clusters import group
from bigmodel.models import Param
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, Program, ProgramBuilder, Task

REDUCE_BYTES = 4
"""Bytes of one element while gradients are reduced: always fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """Parameters that are gathered together."""

    label: str
    padded: int
    """Elements of all shards together, each padded in dim 0 to equal size."""
    trained: int
    """The same of trained parameters."""
    gradients: int
    """Elements of their gradients, which carry no padding."""


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the program of every rank's step.

    Args:
        plan: A plan of backend `fsdp2`.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    builder = ProgramBuilder()
    steps = steps_of(plan, costs.model.sequence)
    shards = Shards(plan, costs, builder, Walk(plan, costs, builder, steps))
    for index in range(micro_batches):
        shards.forward(index)
        shards.backward(index, last=index == micro_batches - 1)
    shards.update()
    return (builder.build(),)


class Shards:
    """A whole model, or a pipeline stage, sharded with `fully_shard`.

    Args:
        plan: The plan; its mesh says how many shards and replicas.
        costs: Of the model on the cluster.
        builder: The program that is written.
        walk: The units of this rank.
    """

    def __init__(
        self, plan: Plan, costs: Costs, builder: ProgramBuilder, walk: Walk
    ) -> None:
        self.walk = walk
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._width = weight_bytes(plan)
        self._ranks = plan.mesh.shard
        self._group = group(costs.cluster, self._ranks)
        self._replicas = group(costs.cluster, plan.mesh.replicate, self._ranks)
        self._stream = communication(costs)
        self._root = _group("(root)", _outside(walk.steps), self._ranks)
        self._groups = [
            _group(step.label, list(step.unit.owned()), self._ranks)
            if step.placed.role == "block" and step.unit.elements
            else None
            for step in walk.steps
        ]
        groups = [self._root, *(g for g in self._groups if g)]
        self._trained = sum(g.trained for g in groups) / self._ranks
        self._largest = max(
            (p.elements for step in walk.steps for p in step.unit.owned()), default=0
        )
        elements = sum(g.padded for g in groups) / self._ranks
        builder.hold(WEIGHTS, elements * 4)
        builder.hold(OPTIMIZER, optimizer_state_bytes(plan, self._trained))
        hold_inputs(builder, costs, plan, walk.steps)
        self._output: ShardGroup | None = None
        self._reducing: ShardGroup | None = None
        self._prefetched: tuple[int, int] | None = None
        self._gradients = False
        self._reductions: list[int] = []
        self._root_gathered = False

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        if not self._root_gathered:
            self._gather(self._root)
            self._root_gathered = True
        self.walk.forward(
            f"micro-batch {index}",
            before=self._before_forward,
            after=self._after_forward,
        )
        self._drop_output()

    def backward(self, index: int, *, last: bool = True) -> None:
        """Write the backward of a micro-batch; gradients are reduced each time."""
        self._prefetch(len(self._groups))
        self.walk.backward(
            f"micro-batch {index}",
            before=self._before_backward,
            after=lambda at: self._after_backward(at, last=last),
        )
        self._reduce(self._root, last=last)
        if last:
            # Until then the last reduce-scatter input stays through the next forward.
            self._free_reducing()
        self._builder.add(
            Task(label="wait for gradients", after=tuple(self._reductions))
        )
        self._reductions = []
        self._gradients = True

    def update(self) -> None:
        """Write the optimizer's step and the end of the gradients."""
        largest = ceil(self._largest / self._ranks)
        self._builder.add(
            Task(
                label="optimizer step",
                seconds=step_seconds(self._plan, self._costs, self._trained),
                surge=(
                    (STEP, step_surge(self._plan, self._costs, self._trained, largest)),
                ),
            )
        )
        self._builder.allocate(GRADIENTS, -self._trained * 4, "drop gradients")

    def _before_forward(self, at: int) -> tuple[int, ...]:
        unit = self._groups[at]
        return (self._gather(unit),) if unit else ()

    def _after_forward(self, at: int) -> None:
        unit = self._groups[at]
        if unit and self._plan.reshard_after_forward:
            self._free(GATHERED, unit.padded * self._width, f"reshard {unit.label}")

    def _before_backward(self, at: int) -> tuple[int, ...]:
        unit = self._groups[at]
        if not unit or not self._plan.reshard_after_forward:
            return ()
        if self._prefetched and self._prefetched[0] == at:
            task = self._prefetched[1]
        else:
            task = self._all_gather(unit)
        self._prefetched = None
        size = unit.padded * self._width
        copied = self._copy_out(unit, task)
        self._free(GATHERED, size, f"free all-gather {unit.label}")
        self._prefetch(at)
        return (copied,)

    def _after_backward(self, at: int, *, last: bool) -> None:
        unit = self._groups[at]
        if unit:
            self._free(GATHERED, unit.padded * self._width, f"reshard {unit.label}")
            self._reduce(unit, last=last)

    def _prefetch(self, at: int) -> None:
        """Gather the group whose backward comes next, while this one computes."""
        if not self._plan.reshard_after_forward:
            return
        for before in reversed(range(at)):
            unit = self._groups[before]
            if unit:
                self._prefetched = (before, self._all_gather(unit))
                return

    def _all_gather(self, unit: ShardGroup) -> int:
        size = unit.padded * self._width
        # A shard is cast to the computing type before it is sent.
        cast = size // self._ranks if self._width == 2 else 0
        surge = size + max(cast, scratch(self._costs, size))
        return self._builder.add(
            Task(
                label=f"all-gather {unit.label}",
                stream=self._stream,
                seconds=self._group.gather(size),
                change=((GATHERED, size),),
                surge=((GATHERED, surge),),
            )
        )

    def _copy_out(self, unit: ShardGroup, task: int) -> int:
        return self._builder.add(
            Task(
                label=f"copy out {unit.label}",
                after=(task,),
                change=((GATHERED, unit.padded * self._width),),
            )
        )

    def _gather(self, unit: ShardGroup) -> int:
        task = self._copy_out(unit, self._all_gather(unit))
        self._drop_output()
        self._output = unit
        return task

    def _drop_output(self) -> None:
        if self._output:
            size = self._output.padded * self._width
            self._free(GATHERED, size, f"free all-gather {self._output.label}")
        self._output = None

    def _reduce(self, unit: ShardGroup, *, last: bool) -> None:
        self._free_reducing()
        size = unit.trained * REDUCE_BYTES
        if not size:
            return
        builder = self._builder
        computed = builder.allocate(BUCKETS, size, f"reduce-scatter input {unit.label}")
        made = unit.gradients * self._width
        builder.allocate(GRADIENTS, -made, f"copied gradients {unit.label}")
        shard = size // self._ranks
        seconds = self._group.gather(size)
        if last and self._plan.mesh.replicate > 1:
            seconds += self._replicas.reduce(shard)
        self._reductions.append(
            builder.add(
                Task(
                    label=f"reduce-scatter {unit.label}",
                    stream=self._stream,
                    seconds=seconds,
                    after=(computed,),
                    change=() if self._gradients else ((GRADIENTS, shard),),
                    surge=((GRADIENTS, shard), (BUCKETS, scratch(self._costs, size))),
                )
            )
        )
        self._reducing = unit

    def _free_reducing(self) -> None:
        if self._reducing:
            size = self._reducing.trained * REDUCE_BYTES
            self._free(BUCKETS, size, "free reduce-scatter input")
        self._reducing = None

    def _free(self, kind: str, size: int, label: str) -> None:
        self._builder.allocate(kind, -size, label)


def _outside(steps: Sequence[Step]) -> list[Param]:
    return [
        p for step in steps if step.placed.role != "block" for p in step.unit.owned()
    ]


def _group(label: str, params: Sequence[Param], ranks: int) -> ShardGroup:
    padded = {True: 0, False: 0}
    for param in params:
        rows = param.shape[0] if param.shape else 1
        row = param.elements // max(rows, 1)
        padded[param.trainable] += ceil(rows / ranks) * ranks * row
    return ShardGroup(
        label=label,
        padded=padded[True] + padded[False],
        trained=padded[True],
        gradients=sum(param.elements for param in params if param.trainable),
    )
