"""What DistributedDataParallel does to memory and time, to a model or to a stage.

Source: torch 2.13, `torch/csrc/distributed/c10d/reducer.cpp` and
`torch/nn/parallel/distributed.py`. Buckets hold every gradient and stay. With gradient
views (`gradient_as_bucket_view`) a gradient that autograd made is copied into its
bucket and replaced by the view; without, both stay to the end of the step. Under
`no_sync` gradients accumulate in tensors of their own, views or not, because the step
before has set them to None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from bigmodel.backends.compression import compression
from bigmodel.backends.gradient_sums import GradientSums
from bigmodel.backends.part import AbstractPart
from bigmodel.backends.stepping import hold_states, step_task
from bigmodel.backends.walk import (
    BUCKETS,
    GRADIENTS,
    HOOK,
    Walk,
    communication,
    hold_inputs,
    hold_weights,
    trainable,
    weight_bytes,
)
from bigmodel.clusters import group
from bigmodel.models import Gradient, Param, Shape
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task
from bigmodel.units import MIB


@final
class Replica(AbstractPart):
    """A whole model, or a pipeline stage, replicated with DDP.

    Args:
        plan: The plan; its mesh says how many replicas.
        costs: Of the model on the cluster.
        builder: The program that is written.
        walk: The units of this rank.
        stepped: The parameters whose optimizer states this rank keeps; None: all. The
            others come from the ranks that step them.
        batch: Whether the batch is held here, and not by several parts' owner.
        squares: Whether gradients are squared one by one as they come (AdaScale).
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        builder: ProgramBuilder,
        walk: Walk,
        stepped: Sequence[Param] | None = None,
        *,
        batch: bool = True,
        squares: bool = False,
    ) -> None:
        self.walk = walk
        self._plan = plan
        self._squares = squares
        self._costs = costs
        self._builder = builder
        self._width = weight_bytes(plan)
        self._trained = trainable(walk.steps)
        self._elements = sum(p.elements for p in self._trained)
        self._stepped = self._trained if stepped is None else stepped
        self._own = sum(p.elements for p in self._stepped)
        self._group = group(costs.cluster, plan.mesh.replicate, plan.mesh.shard)
        self._bucketed = plan.mesh.replicate > 1
        self._sums = GradientSums(plan, costs, builder)
        reduced = 4 if self._sums.in_fp32 else self._width
        self._hook = compression(plan.ddp, self._trained, reduced)
        self._has_gradients = False
        self._bucket = 0
        self._missing = 0
        self._sent_before = False
        self._reductions: list[int] = []
        hold_weights(builder, plan, walk.steps)
        hold_states(builder, plan, self.stepped)
        if self._bucketed:
            builder.hold(BUCKETS, self._elements * self._width, self._bucket_sizes())
            builder.hold(HOOK, self._hook.held)
        hold_inputs(builder, costs, plan, walk.steps, batch=batch)

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        self.walk.forward(f"micro-batch {index}")

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch; the last one reduces the gradients."""
        synchronise = last and self._bucketed
        self._missing = self._elements * self._width

        def on_gradients(gradients: tuple[Gradient, ...], task: int) -> None:
            size = sum(g.elements for g in gradients) * self._width
            if self._squares:
                largest = max(g.elements for g in gradients) * self._width
                surge = ((GRADIENTS, largest),)
                self._builder.add(Task(label="square gradient", surge=surge))
            # The gradient that is there becomes a view of its bucket. Autograd holds
            # the one it made, the same or one added to it, until the hook is done.
            added = self._has_gradients and not self._sums.in_fp32
            views = synchronise and self._plan.ddp.gradient_views
            if views and added:
                self._free(size)
            if synchronise:
                self._fill(size, task)
            if views and not added:
                self._free(size)
            if not (synchronise and self._sums.in_fp32):
                sizes = [g.elements for g in gradients]
                self._sums.add(sizes, first=not self._has_gradients)

        self.walk.backward(f"micro-batch {index}", on_gradients=on_gradients)
        if synchronise:
            self._send(self._builder.last)
            self._sent_before = False
            self._builder.add(
                Task(label="wait for gradients", after=tuple(self._reductions))
            )
        self._has_gradients = True

    def backward_of_weights(self, index: int, *, last: bool) -> None:
        """Write the part of a backward that makes the gradients of weights.

        Without DDP: torch sets these gradients past its hooks.
        """

        def on_gradients(gradients: tuple[Gradient, ...], task: int) -> None:
            sizes = [g.elements for g in gradients]
            if self._sums.in_fp32:
                moved_at_end.extend(sizes)
            else:
                self._sums.add(sizes, first=not self._has_gradients)

        moved_at_end: list[int] = []
        self.walk.backward_of_weights(f"micro-batch {index}", on_gradients)
        if moved_at_end:
            self._sums.add(moved_at_end, first=not self._has_gradients)
        self._has_gradients = True

    def update(self) -> None:
        """Write the optimizer's step and the end of the gradients."""
        self.step()
        self.drop_gradients()

    @property
    def stepped(self) -> list[Shape]:
        """Shapes of what this rank steps."""
        return [param.shape for param in self._stepped]

    def step(self, together: Sequence[Shape] = ()) -> None:
        """Write the optimizer's step; see `stepping.step_task`."""
        builder, plan = self._builder, self._plan
        trained = [param.elements for param in self._trained]
        self._sums.finish(trained, in_bucket=not self._own_gradients)
        if self._sums.in_fp32 and self._bucketed:
            builder.allocate(GRADIENTS, -self._own_gradients, "drop half gradients")
        builder.add(step_task(plan, self._costs, self.stepped, together))
        if self._own < self._elements:
            builder.add(
                Task(
                    label="broadcast stepped weights",
                    stream=communication(self._costs),
                    # Masters travel where there are any.
                    seconds=self._group.gather(self._elements * 4),
                    after=(builder.last,),
                )
            )

    def drop_gradients(self) -> None:
        """Write the end of the gradients."""
        held = self._elements * 4 if self._width == 2 else self._own_gradients
        gone = [-4 * param.elements for param in self._trained] if held else []
        self._builder.allocate(GRADIENTS, -held, "drop gradients", gone)

    @property
    def _own_gradients(self) -> int:
        """Bytes of the gradients that autograd made, beyond the buckets."""
        views = self._bucketed and self._plan.ddp.gradient_views
        return 0 if views else self._elements * self._width

    def _free(self, size: int) -> None:
        self._builder.allocate(GRADIENTS, -size, "copy into bucket")

    def _bucket_sizes(self) -> list[int]:
        """Return the bytes of the buckets, filled from the last parameter on."""
        sizes = [0]
        for param in reversed(self._trained):
            if sizes[-1] >= self._cap(first=len(sizes) == 1):
                sizes.append(0)
            sizes[-1] += param.elements * self._width
        return sizes

    def _cap(self, *, first: bool) -> float:
        # An explicit cap, even torch's default, holds for the first bucket too.
        options = self._plan.ddp
        megabytes = options.bucket_megabytes
        if first and options.first_bucket_megabytes is not None:
            megabytes = options.first_bucket_megabytes
        return megabytes * MIB

    def _fill(self, size: int, task: int) -> None:
        self._bucket += size
        self._missing -= size
        # The last gradient sends what is left.
        if self._bucket >= self._cap(first=not self._sent_before) or not self._missing:
            self._send(task)

    def _send(self, task: int) -> None:
        if not self._bucket:
            return
        size = self._bucket
        if self._sums.in_fp32:
            # A bucket in fp32, into which the sums move one after another.
            size = self._bucket // self._width * 4
            change = () if self._has_gradients else ((GRADIENTS, size),)
            task = self._builder.add(
                Task(
                    label="sum into bucket",
                    after=(task,),
                    change=change,
                    surge=((GRADIENTS, size),),
                )
            )
        self._reductions.append(
            self._builder.add(
                Task(
                    label="all-reduce bucket",
                    stream=communication(self._costs),
                    seconds=self._group.reduce(size * self._hook.sent),
                    after=(task,),
                    surge=((HOOK, int(size * self._hook.surge)),),
                )
            )
        )
        self._bucket = 0
        self._sent_before = True
