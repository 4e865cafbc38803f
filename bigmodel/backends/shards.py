"""What `fully_shard` does to memory and time, to a model or to a pipeline stage.

Source: torch 2.13, `torch/distributed/fsdp/_fully_shard/`. Every block is a group, the
rest of the model is the root group. For a group of u bytes of unsharded weights:

    forward    all-gather output u, copied out into unsharded weights u; the output is
               kept until the next group has copied out (implicit prefetch)
    backward   the next group's all-gather output is already there; gradients u; at the
               end the weights go, a reduce-scatter input (u in the reduce type) comes
               and stays until the next group's, and a shard of gradients remains

The root's weights stay gathered from forward to backward, whatever the policy.

torch's pipeline stages postpone the reduction: until the last micro-batch weights stay
gathered after a backward, and whole gradients add up in the reduce type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import final

from bigmodel.backends.part import AbstractPart
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
    weight_bytes,
)
from bigmodel.clusters import group
from bigmodel.models import Param
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task
from bigmodel.simulator.program import Stream

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


@final
class Shards(AbstractPart):
    """A whole model, or a pipeline stage, sharded with `fully_shard`.

    Args:
        plan: The plan; its mesh says how many shards and replicas.
        costs: Of the model on the cluster.
        builder: The program that is written.
        walk: The units of this rank.
        postpone: Gradients are reduced after the last micro-batch only.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        builder: ProgramBuilder,
        walk: Walk,
        *,
        postpone: bool = False,
    ) -> None:
        self.walk = walk
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._postpone = postpone
        self._width = weight_bytes(plan)
        self._ranks = plan.mesh.shard
        self._group = group(costs.cluster, self._ranks)
        self._replicas = group(costs.cluster, plan.mesh.replicate, self._ranks)
        self._stream: Stream = communication(costs)
        self._root = _group("(root)", _outside(walk.steps), self._ranks)
        self._groups = [
            _group(step.label, step.owned, self._ranks)
            if step.placed.role == "block" and step.elements
            else None
            for step in walk.steps
        ]
        groups = [self._root, *(g for g in self._groups if g)]
        self._trained = sum(g.trained for g in groups) / self._ranks
        self._largest = max(
            (p.elements for step in walk.steps for p in step.owned), default=0
        )
        elements = sum(g.padded for g in groups) / self._ranks
        builder.hold(WEIGHTS, elements * 4)
        builder.hold(OPTIMIZER, optimizer_state_bytes(plan, self._trained))
        hold_inputs(builder, costs, plan, walk.steps)
        self._output: ShardGroup | None = None
        self._reducing: ShardGroup | None = None
        self._prefetched: tuple[int, int] | None = None
        self._gathered: set[str] = set()
        self._accumulated: set[str] = set()
        self._sharded_gradients = False
        self._reductions: list[int] = []

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        self._before_forward_of(self._root)
        self.walk.forward(
            f"micro-batch {index}",
            before=self._before_forward,
            after=self._after_forward,
        )
        self._drop_output()

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch."""
        reduce = last or not self._postpone
        self._prefetch(len(self._groups))
        self.walk.backward(
            f"micro-batch {index}",
            before=self._before_backward,
            after=lambda at: self._after_backward(self._groups[at], reduce, last),
        )
        self._after_backward(self._root, reduce, last)
        if last:
            # Until then the last reduce-scatter input stays through the next forward.
            self._free_reducing()
        self._builder.add(
            Task(label="wait for gradients", after=tuple(self._reductions))
        )
        self._reductions = []
        self._sharded_gradients = self._sharded_gradients or reduce

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
        return self._before_forward_of(self._groups[at])

    def _before_forward_of(self, unit: ShardGroup | None) -> tuple[int, ...]:
        if not unit or not unit.padded or unit.label in self._gathered:
            return ()
        task = self._copy_out(unit, self._all_gather(unit))
        self._drop_output()
        self._output = unit
        return (task,)

    def _after_forward(self, at: int) -> None:
        unit = self._groups[at]
        if unit and self._plan.fsdp2.reshard_after_forward:
            self._reshard(unit)

    def _before_backward(self, at: int) -> tuple[int, ...]:
        unit = self._groups[at]
        waits: tuple[int, ...] = ()
        if unit and unit.label not in self._gathered:
            if self._prefetched and self._prefetched[0] == at:
                task = self._prefetched[1]
            else:
                task = self._all_gather(unit)
            self._prefetched = None
            waits = (self._copy_out(unit, task),)
            size = self._output_bytes(unit)
            self._free(GATHERED, size, f"free all-gather {unit.label}")
        if unit:
            self._prefetch(at)
        return waits

    def _after_backward(
        self, unit: ShardGroup | None, reduce: bool, last: bool
    ) -> None:
        if not unit:
            return
        if reduce:
            self._reshard(unit)
            self._reduce(unit, last=last)
        else:
            self._accumulate(unit)

    def _accumulate(self, unit: ShardGroup) -> None:
        """Keep whole gradients, in the reduce type."""
        made, kept = unit.gradients * self._width, unit.gradients * REDUCE_BYTES
        if unit.label in self._accumulated:
            self._free(GRADIENTS, made, f"accumulate gradients {unit.label}")
        elif made != kept:
            self._builder.allocate(GRADIENTS, kept, f"gradients to fp32 {unit.label}")
            self._free(GRADIENTS, made, f"drop bfloat16 gradients {unit.label}")
        self._accumulated.add(unit.label)

    def _reshard(self, unit: ShardGroup) -> None:
        if unit.label in self._gathered:
            self._free(GATHERED, unit.padded * self._width, f"reshard {unit.label}")
            self._gathered.discard(unit.label)

    def _prefetch(self, at: int) -> None:
        """Gather the group whose backward comes next, while this one computes."""
        for before in reversed(range(at)):
            unit = self._groups[before]
            if unit:
                if unit.label not in self._gathered and not self._prefetched:
                    self._prefetched = (before, self._all_gather(unit))
                return

    def _output_bytes(self, unit: ShardGroup) -> int:
        """Return the bytes of an all-gather's output; a single rank has none."""
        return unit.padded * self._width if self._ranks > 1 else 0

    def _all_gather(self, unit: ShardGroup) -> int:
        size = self._output_bytes(unit)
        # A shard is cast to the computing type before it is sent.
        cast = size // self._ranks if self._width == 2 else 0
        surge = size + max(cast, self._scratch(size))
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
        self._gathered.add(unit.label)
        return self._builder.add(
            Task(
                label=f"copy out {unit.label}",
                after=(task,),
                change=((GATHERED, unit.padded * self._width),),
            )
        )

    def _drop_output(self) -> None:
        if self._output:
            size = self._output_bytes(self._output)
            self._free(GATHERED, size, f"free all-gather {self._output.label}")
        self._output = None

    def _reduce(self, unit: ShardGroup, *, last: bool) -> None:
        size = unit.trained * REDUCE_BYTES
        if not size:
            return
        self._free_reducing()
        builder = self._builder
        computed = builder.allocate(BUCKETS, size, f"reduce-scatter input {unit.label}")
        made = unit.gradients * self._width
        if unit.label in self._accumulated:
            # The sum of the micro-batches before, in the reduce type, goes as well.
            made += unit.gradients * REDUCE_BYTES
            self._accumulated.discard(unit.label)
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
                    change=() if self._sharded_gradients else ((GRADIENTS, shard),),
                    surge=((GRADIENTS, shard), (BUCKETS, self._scratch(size))),
                )
            )
        )
        self._reducing = unit

    def _scratch(self, size: int) -> int:
        return scratch(self._costs, size) if self._ranks > 1 else 0

    def _free_reducing(self) -> None:
        if self._reducing:
            size = self._reducing.trained * REDUCE_BYTES
            self._free(BUCKETS, size, "free reduce-scatter input")
        self._reducing = None

    def _free(self, kind: str, size: int, label: str) -> None:
        self._builder.allocate(kind, -size, label)


def _outside(steps: Sequence[Step]) -> list[Param]:
    return [p for step in steps if step.placed.role != "block" for p in step.owned]


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
