"""Gradients on their way to shards, as `fully_shard` reduces them.

Source: torch 2.13, `foreach_reduce` in
`torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`. After a group's backward a
reduce-scatter input (in the reduce type) comes, the whole gradients go, and a shard in
fp32 remains; the input stays until the next group's.

Where the reduction is postponed, whole gradients add up: in place, one parameter after
the other, if they have the reduce type already; else a group at a time, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import final

from bigmodel.backends.host import copy_seconds, host_step_seconds
from bigmodel.backends.shard_gathers import offloads
from bigmodel.backends.shard_groups import Partition, ShardGroup
from bigmodel.backends.stepping import step_task
from bigmodel.backends.walk import (
    BUCKETS,
    GRADIENTS,
    communication,
    scratch,
    weight_bytes,
)
from bigmodel.clusters import group
from bigmodel.models import Shape
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task
from bigmodel.simulator.program import Stream

POOL = "reduce-scatter"
"""torch makes what a reduction returns on the stream of reductions."""
REDUCE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of one element while gradients are reduced."""


@final
class Reductions:
    """Writes reductions, what they hold, and the step over what they leave.

    Args:
        plan: The plan.
        costs: Of the model on the cluster.
        builder: The program that is written.
        parts: The groups.
    """

    def __init__(
        self, plan: Plan, costs: Costs, builder: ProgramBuilder, parts: Partition
    ) -> None:
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._width = weight_bytes(plan)
        self._reduce_width = REDUCE_BYTES[plan.fsdp2.reduce_dtype]
        self._ranks = plan.mesh.shard
        self._replicated = plan.mesh.replicate > 1
        self._group = group(costs.cluster, self._ranks)
        self._replicas = group(costs.cluster, plan.mesh.replicate, self._ranks)
        self._everyone = group(costs.cluster, self._ranks * plan.mesh.replicate)
        self._stream: Stream = communication(costs)
        self._offloads = offloads(plan, costs)
        self.whole = sum(p.elements for p in parts.whole if p.trainable)
        """Trained parameters that are left out of sharding."""
        self.shards = sum(unit.trained for unit in parts.groups) / self._ranks
        """Elements of trained shards on this rank."""
        self._reducing: ShardGroup | None = None
        self._held = 0
        self._partial = False
        self._accumulated: set[str] = set()
        self._has_shards = False
        self._tasks: list[int] = []

    @property
    def in_place(self) -> bool:
        """Whether postponed gradients add up where they are made."""
        return self._width == self._reduce_width

    def add_up(self, elements: int) -> None:
        """Free a whole gradient that has been added to the one before."""
        self._builder.allocate(GRADIENTS, -elements * self._width, "add up gradients")

    def accumulate(self, unit: ShardGroup, *, keep: bool) -> None:
        """Add whole gradients to those before, in the reduce type.

        Args:
            unit: Whose gradients.
            keep: Whether they stay whole for a later micro-batch.
        """
        if self.in_place:
            return
        if unit.label in self._accumulated:
            self._cast(unit)
        elif keep:
            label = f"gradients to fp32 {unit.label}"
            self._change(unit, self._reduce_width, label)
            self._accumulated.add(unit.label)
        else:
            return
        self._drop(unit, self._width, f"drop half gradients {unit.label}")

    def reduce(self, unit: ShardGroup, *, last: bool) -> None:
        """Reduce a group's gradients, or the sum that they were added to, to shards."""
        size = unit.trained * self._reduce_width
        if not size:
            return
        self.free_input()
        computed = self._builder.allocate(
            BUCKETS, size, f"reduce-scatter input {unit.label}", unit=unit.label
        )
        added = unit.label in self._accumulated
        width = self._reduce_width if added else self._width
        self._accumulated.discard(unit.label)
        self._drop(unit, width, f"copied gradients {unit.label}")
        self._reducing = unit
        self._tasks.append(self._reduce_scatter(unit, size, computed, last))

    def end_backward(self, *, last: bool, reduced: bool) -> None:
        """Wait for the reductions of a backward."""
        if last:
            # Until then the last reduce-scatter input stays through the next forward.
            self.free_input()
            self._builder.allocate(BUCKETS, -self._held, "free all-reduce inputs")
            self._held = 0
        self._builder.add(Task(label="wait for gradients", after=tuple(self._tasks)))
        self._tasks = []
        self._has_shards = self._has_shards or reduced
        self._partial = self._replicated and reduced and not last

    def free_input(self) -> None:
        """Free the input of the reduce-scatter before."""
        unit = self._reducing
        if unit is not None:
            size = unit.trained * self._reduce_width
            self._builder.allocate(
                BUCKETS, -size, "free reduce-scatter input", unit=unit.label
            )
        self._reducing = None

    def step(self, shapes: Sequence[Shape], together: Sequence[Shape]) -> None:
        """Write the optimizer's step over shards; see `stepping.step_task`."""
        if self.whole:
            size = self.whole * 4
            task = Task(
                label="all-reduce whole gradients",
                stream=self._stream,
                seconds=self._everyone.reduce(size),
                after=(self._builder.last,),
            )
            self._builder.add(Task(label="wait", after=(self._builder.add(task),)))
        if self._offloads:
            self._step_on_host()
            return
        self._builder.add(step_task(self._plan, self._costs, shapes, together))

    def drop_gradients(self) -> None:
        """Write the end of the gradients; on the host they have a fixed place."""
        if not self._offloads:
            trained = self.shards + self.whole
            self._builder.allocate(GRADIENTS, -trained * 4, "drop gradients")

    def _reduce_scatter(
        self, unit: ShardGroup, size: int, computed: int, last: bool
    ) -> int:
        seconds = self._group.gather(size)
        sent = size // self._ranks
        if last and self._replicated:
            seconds += self._replicas.reduce(sent)
        made, held = self._shard_change(sent, last)
        whole = sent * 4 // self._reduce_width
        cast = whole if whole > sent and (last or not self._replicated) else 0
        scratched = scratch(self._costs, size) if self._ranks > 1 else 0
        task = self._builder.add(
            Task(
                label=f"reduce-scatter {unit.label}",
                stream=self._stream,
                seconds=seconds,
                after=(computed,),
                change=((GRADIENTS, made), (BUCKETS, held)),
                surge=((GRADIENTS, sent), (BUCKETS, max(scratched, cast))),
                pool=POOL,
                unit=unit.label,
            )
        )
        if not self._offloads or (self._replicated and not last):
            return task
        return self._builder.add(
            Task(
                label=f"gradients to the host {unit.label}",
                stream="host",
                seconds=copy_seconds(
                    self._costs.cluster, unit.trained * 4 / self._ranks
                ),
                after=(task,),
            )
        )

    def _shard_change(self, sent: int, last: bool) -> tuple[int, int]:
        """Return what a reduction leaves of gradients, and of buckets.

        Between replicas shards add up in the reduce type, on the device, until the last
        micro-batch; what was all-reduced and does not become the gradient itself is
        held to the end of the backward.
        """
        whole = sent * 4 // self._reduce_width
        if self._replicated and not last:
            return (0 if self._has_shards else sent), 0
        if not self._replicated:
            return (0 if self._has_shards or self._offloads else whole), 0
        held = sent if self._offloads or whole > sent else 0
        self._held += held
        kept = 0 if self._offloads else whole
        return kept - (sent if self._partial else 0), held

    def _cast(self, unit: ShardGroup) -> None:
        """Write what adding 16-bit gradients to sums in fp32 takes on a CPU.

        torch 2.13 casts an operand there before it adds; CUDA's kernels as they read.
        """
        if self._costs.cluster.device.kind == "cpu":
            surge = ((GRADIENTS, unit.largest * self._reduce_width),)
            self._builder.add(Task(label=f"cast gradients {unit.label}", surge=surge))

    def _step_on_host(self) -> None:
        step = self._builder.add(
            Task(
                label="optimizer step on the host",
                stream="host",
                seconds=host_step_seconds(self._plan, self._costs.cluster, self.shards),
                after=(self._builder.last,),
            )
        )
        self._builder.add(Task(label="wait for the host", after=(step,)))

    def _drop(self, unit: ShardGroup, width: int, label: str) -> None:
        """Write the end of a group's whole gradients, of so many bytes an element."""
        self._change(unit, -width, label)

    def _change(self, unit: ShardGroup, width: int, label: str) -> None:
        """Write that whole gradients come, of so many bytes an element, or go."""
        made = zip(unit.makers, unit.gradients, strict=True)
        for maker, entries in groupby(made, key=lambda entry: entry[0]):
            sizes = [size * width for _, size in entries]
            self._builder.allocate(GRADIENTS, sum(sizes), label, sizes, unit=maker)
