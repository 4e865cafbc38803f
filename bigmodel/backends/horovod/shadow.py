"""The step of a model that is replicated with Horovod's DistributedOptimizer.

Source: Horovod 0.28.1, `horovod/torch/{optimizer,compression}.py`, `horovod/common/
{operations,controller,fusion_buffer_manager}.cc`. A hook on every parameter starts its
all-reduce when the last of `backward_passes_per_step` backwards has added its gradient.
A thread wakes every millisecond, copies the gradients that are ready on all ranks into
the fusion buffer, reduces it and copies them back: gradients stay where they are. The
buffer has the size of HOROVOD_FUSION_THRESHOLD, is made when two gradients first
travel together, and stays. With fp16 compression every gradient has a copy in float16
from its hook to the end of the wait, in which it becomes a new fp32 gradient.
"""

from __future__ import annotations

from typing import final

from bigmodel.backends.part import AbstractPart, write_step
from bigmodel.backends.stepping import hold_states, step_task
from bigmodel.backends.walk import (
    BUCKETS,
    GRADIENTS,
    HOOK,
    Walk,
    communication,
    hold_inputs,
    hold_weights,
    steps_of,
    trainable,
    weight_bytes,
)
from bigmodel.clusters import group
from bigmodel.models import Gradient
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, Program, ProgramBuilder, Task
from bigmodel.simulator.roofline import pass_seconds
from bigmodel.units import MIB


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the program of every rank's step.

    Args:
        plan: A plan of backend `horovod`.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    builder = ProgramBuilder()
    walk = Walk(plan, costs, builder, steps_of(plan, costs.model.sequence))
    return (write_step(_Replica(plan, costs, builder, walk), builder, micro_batches),)


@final
class _Replica(AbstractPart):
    """A whole model whose gradients Horovod averages."""

    def __init__(
        self, plan: Plan, costs: Costs, builder: ProgramBuilder, walk: Walk
    ) -> None:
        self.walk = walk
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._width = weight_bytes(plan)
        trained = trainable(walk.steps)
        self._shapes = [param.shape for param in trained]
        self._sizes = [param.elements for param in trained]
        self._elements = sum(self._sizes)
        self._group = group(costs.cluster, plan.mesh.replicate)
        self._reduces = plan.mesh.replicate > 1
        self._threshold = int(plan.horovod.fusion_megabytes * MIB)
        self._compresses = self._reduces and plan.horovod.compression == "fp16"
        self._sent_width = 2 if self._compresses else self._width
        self._has_gradients = False
        self._ready: list[Gradient] = []
        self._order: list[int] = []
        self._reductions: list[int] = []
        hold_weights(builder, plan, walk.steps)
        hold_states(builder, plan, self._shapes)
        if self._reduces and self._fuses(self._sizes):
            builder.hold(BUCKETS, self._threshold)
        hold_inputs(builder, costs, plan, walk.steps)

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        self.walk.forward(f"micro-batch {index}")

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch; the last one reduces the gradients."""
        reduces = last and self._reduces

        def on_gradients(gradients: tuple[Gradient, ...], task: int) -> None:
            size = sum(g.elements for g in gradients) * self._width
            if self._has_gradients:
                # Added to the gradient that is there; what autograd made goes.
                self._builder.allocate(GRADIENTS, -size, "accumulate gradient")
            if reduces:
                self._compress(gradients)
                self._ready += gradients

        def after(unit: int) -> None:
            # A unit takes longer than the millisecond between two rounds.
            if reduces:
                self._send(self._builder.last)

        self.walk.backward(
            f"micro-batch {index}", on_gradients=on_gradients, after=after
        )
        self._has_gradients = True
        if reduces:
            self._send(self._builder.last)
            self._wait()

    def update(self) -> None:
        """Write the optimizer's step and the end of the gradients."""
        self._builder.add(step_task(self._plan, self._costs, self._shapes))
        size = self._elements * self._width
        self._builder.allocate(GRADIENTS, -size, "drop gradients")

    def _fuses(self, elements: list[int]) -> bool:
        """Return whether any two gradients fit into the buffer together."""
        sizes = sorted(count * self._sent_width for count in elements)
        return len(sizes) > 1 and sizes[0] + sizes[1] <= self._threshold

    def _compress(self, gradients: tuple[Gradient, ...]) -> None:
        if not self._compresses:
            return
        for gradient in gradients:
            self._order.append(gradient.elements)
            self._builder.allocate(HOOK, gradient.elements * 2, "compress gradient")

    def _send(self, task: int) -> None:
        """Write the reductions of what is ready, a buffer at a time."""
        fused = 0
        for gradient in self._ready:
            size = gradient.elements * self._sent_width
            if fused and fused + size > self._threshold:
                self._reduce(fused, task)
                fused = 0
            fused += size
        self._reduce(fused, task)
        self._ready = []

    def _reduce(self, size: int, task: int) -> None:
        if not size:
            return
        # Into the buffer and back: each reads and writes.
        copies = pass_seconds(4 * size, self._costs.cluster.device)
        self._reductions.append(
            self._builder.add(
                Task(
                    label="all-reduce fused gradients",
                    stream=communication(self._costs),
                    seconds=self._group.reduce(size) + copies,
                    after=(task,),
                )
            )
        )

    def _wait(self) -> None:
        self._builder.add(
            Task(label="wait for gradients", after=tuple(self._reductions))
        )
        done = 0
        for elements in self._order:
            # The new gradient beside the old one, while the copy before still lives.
            self._builder.add(
                Task(
                    label="decompress gradient",
                    change=((HOOK, -done * 2),),
                    surge=((GRADIENTS, elements * self._width),),
                )
            )
            done = elements
        self._builder.allocate(HOOK, -done * 2, "drop the last copy")
