"""What ZeRO stages 1 and 2 do to memory on one rank.

Source: deepspeed 0.19, `runtime/zero/stage_1_and_2.py`, with `contiguous_gradients`.
Weights are whole and flat, fp32 masters (a copy even of fp32 weights) and optimizer
states are one piece of them.

    stage 1    the bucket, `reduce_bucket_size` elements whatever the model is, comes
               with the first gradient of a step (`setup_buckets`) and stays; gradients
               are whole and add up; after the last backward they go through the bucket
    stage 2    the bucket comes with the first gradient of every micro-batch and goes
               with its end; every gradient is copied into it when it is complete

    a full bucket is averaged with all-reduce, on the stream that computes; where it
    holds gradients of several owners it is copied for that. What this rank owns, whole
    parameters even where it owns a bit of them, is copied on (`grads_in_partition`)

    step       gradients in fp64 one by one for their norm; a flat copy of the piece,
               in fp32; the optimizer; the all-gather of the weights in one go

    overlap    with `overlap_comm` there are two buckets, and stage 1 reduces during the
               last backward too

With `find_unused` whole gradients add up under stage 2 as well, and go through the
bucket after the last backward.

Gradients of stage 2 may add up in fp32 beside 16-bit weights: in one fp32 buffer of the
piece (`_build_compact_grad_partition_buffer`), which is the optimizer's gradient as it
is. An offloaded optimizer has a fp32 gradient of the piece where it is; bits that are
complete are copied there (`copy_grads_in_partition`), and until the last micro-batch
whole gradients of the owned parameters add up there (`accumulated_grads_in_cpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from bigmodel.backends.flat_partition import FlatPartition
from bigmodel.backends.part import AbstractPart
from bigmodel.backends.walk import (
    BUCKETS,
    GRADIENTS,
    STEP,
    WEIGHTS,
    Walk,
    communication,
    gradient_name,
    hold_inputs,
    scratch,
    weight_bytes,
)
from bigmodel.backends.zero_states import States
from bigmodel.backends.zero_types import (
    accumulation_type,
    communication_type,
    overlaps,
)
from bigmodel.clusters import group
from bigmodel.models import Gradient
from bigmodel.plans import Plan
from bigmodel.plans.number_formats import BYTES
from bigmodel.simulator import Costs, ProgramBuilder, Task

NORM_BYTES = 8
"""`get_norm_dtype`, `runtime/zero/utils.py`: gradient norms are taken in fp64."""


@final
class FlatZero(AbstractPart):
    """One rank under ZeRO 1 or 2.

    Args:
        plan: The plan; its mesh says how many ranks share the states.
        costs: Of the model on the cluster.
        builder: The program that is written.
        walk: The units of the model.
        partition: Of the trained parameters.
        rank: Which rank; they differ in the parameters that they own bits of.
        pipelined: Whether it is a stage of a pipeline, which holds the batch itself and
            calls `reduce` when its last backward has ended.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        builder: ProgramBuilder,
        walk: Walk,
        partition: FlatPartition,
        rank: int,
        *,
        pipelined: bool = False,
    ) -> None:
        self.walk = walk
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._partition = partition
        self._rank = rank
        self._width = weight_bytes(plan)
        self._sent = BYTES[communication_type(plan)]
        self._compact = accumulation_type(plan) != plan.number_format.weights
        self._limit = plan.deepspeed.bucket_elements
        self._buckets = 2 if overlaps(plan) else 1
        self._shards = plan.zero_stage == 2
        self._late = plan.deepspeed.find_unused
        self._group = group(costs.cluster, plan.mesh.shard)
        self._states = States(plan, costs, builder)
        frozen = sum(
            p.elements for step in walk.steps for p in step.owned if not p.trainable
        )
        builder.hold(WEIGHTS, (partition.total + frozen) * self._width)
        self._states.hold(partition.piece)
        if self._states.offloaded:
            self._hold_offloaded()
        hold_inputs(builder, costs, plan, walk.steps, batch=not pipelined)
        self._pipelined = pipelined
        self.after_backward: Callable[[int], None] | None = None
        """Called with a unit's index after its backward."""
        self._at = 0
        self._last = False
        self._has_bucket = False
        self._bucket: list[tuple[str, int]] = []
        self._filled = 0
        self._moved: list[int] = []
        self._has_gradients = False
        self._has_own = False
        self._left_over: list[int] = []
        self._pending: int | None = None

    @property
    def _adds_up_on_host(self) -> bool:
        several = self._plan.accumulation > 1 and not self._late
        return self._shards and several and not self._compact

    def _hold_offloaded(self) -> None:
        tier, keep = self._plan.offload.optimizer, self._states.keep
        partition, width = self._partition, self._width
        keep(tier, GRADIENTS, partition.piece * 4)
        # `param_buffer_of_bit16_for_cpu_offload_groups`, `temp_grad_buffer_for_...`
        keep(tier, BUCKETS, (partition.piece + partition.largest_param) * width)
        self._builder.hold(BUCKETS, partition.largest_param * width)
        if self._adds_up_on_host:
            keep(tier, GRADIENTS, partition.whole(self._rank) * width)

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        self.walk.forward(f"micro-batch {index}")

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch."""
        self._last = last
        self.walk.backward(
            f"micro-batch {index}",
            before=self._enter,
            after=self.after_backward,
            on_gradients=self._on_gradients,
        )
        if not self._pipelined:
            if last and (self._late or not (self._shards or overlaps(self._plan))):
                self._put_all()
            if last or (self._shards and not self._late):
                self._finish()
        self._has_gradients = True

    def reduce(self) -> None:
        """Write the reduction after a pipeline's last backward.

        Another bucket is made for it (`reduce_gradients` with `pipeline_parallel`),
        though the first one is there and is the one that is filled.
        """
        size = self._limit * self._width
        self._builder.allocate(BUCKETS, size, "allocate another bucket")
        self._put_all()
        self._finish()
        self._builder.allocate(BUCKETS, -size, "free the other bucket")

    def update(self) -> None:
        """Write the optimizer's step, the end of the gradients and the all-gather."""
        builder, piece = self._builder, self._partition.piece
        if self._states.offloaded:
            self._states.step(piece)
            if self._compact:
                builder.allocate(GRADIENTS, -piece * 4, "drop gradients")
            self._states.copy("weights to the device", piece * self._width)
            self._gather_weights()
            return
        largest = self._partition.largest(self._rank)
        builder.add(Task(label="gradient norm", surge=((STEP, largest * NORM_BYTES),)))
        if self._compact:
            self._states.step(piece)
            builder.allocate(GRADIENTS, -piece * 4, "drop gradients")
        else:
            self._step_over_flat_copy()
        self._gather_weights()

    def _step_over_flat_copy(self) -> None:
        builder, piece = self._builder, self._partition.piece
        own = self._partition.whole(self._rank) * self._width
        flat = 0 if self._partition.is_one_view(self._rank) else piece * self._width
        builder.allocate(GRADIENTS, flat, "flatten gradients")
        if self._width == 2:
            builder.allocate(GRADIENTS, piece * 4, "gradients to fp32")
            builder.allocate(GRADIENTS, -flat, "drop flat 16-bit gradients")
            flat = piece * 4
        if flat:
            builder.allocate(GRADIENTS, -own, "drop gradients")
        self._states.step(piece)
        builder.allocate(GRADIENTS, -(flat or own), "drop gradients")

    def _gather_weights(self) -> None:
        # `all_gather_into_tensor_dp_groups`: no buckets, whatever their size says.
        if self._plan.mesh.shard == 1:
            return
        size = self._partition.total * self._width
        self._exchange(
            "all-gather weights",
            self._group.gather(size),
            scratch(self._costs, size),
        )

    def _enter(self, at: int) -> tuple[int, ...]:
        self._at = at
        return ()

    def _on_gradients(self, gradients: tuple[Gradient, ...], _: int) -> None:
        if not self._late:
            self._allocate_buckets()
        if (self._late or not self._shards) and self._has_gradients:
            size = sum(g.elements for g in gradients) * self._width
            self._builder.allocate(GRADIENTS, -size, "accumulate gradient")
        if self._late:
            return
        if self._shards or (self._last and overlaps(self._plan)):
            step = self.walk.steps[self._at]
            for gradient in gradients:
                self._put(gradient_name(step.placed, gradient))
            self._free_moved()

    def _put_all(self) -> None:
        self._allocate_buckets()
        for step in self.walk.steps:
            for param in step.owned:
                if param.trainable:
                    self._put(step.full_name(param))

    def _allocate_buckets(self) -> None:
        if self._has_bucket:
            return
        self._has_bucket = True
        size = self._limit * self._width * self._buckets
        self._builder.allocate(BUCKETS, size, "allocate buckets")

    def _put(self, name: str) -> None:
        """Move a gradient into the bucket; one that is larger stays where it is."""
        size = self._partition.size(name)
        if self._filled + size > self._limit:
            self._reduce()
        if size <= self._limit:
            self._moved.append(size * self._width)
        elif self._states.offloaded:
            surge = ((GRADIENTS, size * self._width),)
            self._builder.add(Task(label="clone gradient", surge=surge))
        self._bucket.append((name, size))
        self._filled += size

    def _free_moved(self) -> None:
        if self._moved:
            self._drop(self._moved, "copy into bucket")
        self._moved = []

    def _reduce(self) -> None:
        if not self._bucket:
            return
        self._free_moved()
        owned = [name for name, _ in self._bucket if self._owns(name)]
        if self._compact and owned:
            # The slices of the piece are made, and with them the piece, before.
            self._allocate_own()
        self._exchange(
            "all-reduce bucket",
            self._group.reduce(self._filled * self._sent),
            self._reduction_bytes(),
        )
        if owned and self._states.offloaded:
            self._to_host(owned)
        elif owned:
            self._allocate_own()
        sizes = [n * self._width for _, n in self._bucket if n > self._limit]
        if sizes and (owned or self._shards):
            self._drop(sizes, "drop gradient that is too large")
        else:
            # Stage 1 keeps the gradients of others to the end of the reduction.
            self._left_over += sizes
        self._bucket = []
        self._filled = 0

    def _reduction_bytes(self) -> int:
        """Return what is held beside the bucket while it is reduced.

        A single slice is reduced where it lies; several are concatenated first. Another
        type to send takes a copy, and so does one to add up in.
        """
        apart = self._rank if self._compact else None
        names = (name for name, _ in self._bucket)
        most = 0
        for chunk in self._partition.chunks(names, self._limit, apart):
            size = sum(chunk)
            held = size * self._width if len(chunk) > 1 else 0
            held += size * self._sent if self._sent != self._width else 0
            if self._compact and self._sent == self._width:
                held += max(chunk) * 4
            most = max(most, held)
        return most

    def _allocate_own(self) -> None:
        if self._has_own:
            return
        self._has_own = True
        size = self._partition.whole(self._rank) * self._width
        if self._compact:
            size = self._partition.piece * 4
        self._builder.allocate(GRADIENTS, size, "allocate gradients of this rank")

    def _to_host(self, owned: list[str]) -> None:
        """Copy what is complete to the optimizer's gradient, or sums so far."""
        partition, width = self._partition, self._width
        if self._compact and not self._last:
            return
        pieces = [partition.piece_of(self._rank, name) for name in owned]
        if self._last:
            surge = max(pieces) * NORM_BYTES
            self._builder.add(Task(label="gradient norm", surge=((STEP, surge),)))
            self._states.copy("gradients to the host", sum(pieces) * 4)
        if self._adds_up_on_host:
            sums = sum(partition.size(name) for name in owned) * width
            self._states.copy("sums to the host", sums)

    def _owns(self, name: str) -> bool:
        return self._partition.owns(self._rank, name)

    def _finish(self) -> None:
        """Reduce the rest and let the buckets go (the epilogue of a backward)."""
        self._reduce()
        builder = self._builder
        adds_up = self._shards and self._has_gradients and not self._late
        if adds_up and not self._compact and not self._states.offloaded:
            size = self._partition.whole(self._rank) * self._width
            builder.allocate(GRADIENTS, -size, "accumulate gradients of this rank")
        self._drop(self._left_over, "drop gradients")
        if self._has_bucket:
            size = self._limit * self._width * self._buckets
            builder.allocate(BUCKETS, -size, "free buckets")
        self._left_over = []
        self._has_bucket = False
        if not self._compact:
            self._has_own = False

    def _drop(self, sizes: list[int], label: str) -> None:
        """Write the end of gradients of so many bytes."""
        gone = [-size for size in sizes]
        self._builder.allocate(GRADIENTS, sum(gone), label, gone)

    def _exchange(self, label: str, seconds: float, surge: int) -> None:
        """Write a collective; without overlap the computing stream waits for it."""
        task = self._builder.add(
            Task(
                label=label,
                stream=communication(self._costs),
                seconds=seconds,
                after=(self._builder.last,),
                surge=((BUCKETS, surge),),
            )
        )
        if not overlaps(self._plan):
            self._builder.add(Task(label=f"wait for {label}", after=(task,)))
            return
        # `average_tensor` lets the computing stream wait for the reductions before.
        before, self._pending = self._pending, task
        if before is not None:
            self._builder.add(Task(label=f"wait for {label} before", after=(before,)))
