"""What ZeRO stages 1 and 2 do to memory on one rank.

Source: deepspeed 0.19, `runtime/zero/stage_1_and_2.py`, with `contiguous_gradients` and
without `overlap_comm`. Weights are whole and flat, fp32 masters (a copy even of fp32
weights) and optimizer states are one piece of them.

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

The gradients are accumulated in the weights' own type (`get_data_types`).
"""

from __future__ import annotations

from typing import final

from bigmodel.backends.deepspeed.flat_partition import FlatPartition
from bigmodel.backends.deepspeed.modules import full_name
from bigmodel.backends.part import AbstractPart
from bigmodel.backends.walk import (
    BUCKETS,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    STEP,
    WEIGHTS,
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
from bigmodel.models import Gradient
from bigmodel.plans import Plan
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
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        builder: ProgramBuilder,
        walk: Walk,
        partition: FlatPartition,
        rank: int,
    ) -> None:
        self.walk = walk
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._partition = partition
        self._rank = rank
        self._width = weight_bytes(plan)
        self._limit = plan.deepspeed.bucket_elements
        self._shards = plan.zero_stage == 2
        self._group = group(costs.cluster, plan.mesh.shard)
        frozen = sum(
            p.elements for step in walk.steps for p in step.owned if not p.trainable
        )
        builder.hold(WEIGHTS, (partition.total + frozen) * self._width)
        builder.hold(MASTERS, partition.piece * 4)
        builder.hold(OPTIMIZER, optimizer_state_bytes(plan, partition.piece))
        hold_inputs(builder, costs, plan, walk.steps)
        self._at = 0
        self._has_bucket = False
        self._bucket: list[tuple[str, int]] = []
        self._filled = 0
        self._moved = 0
        self._has_gradients = False
        self._has_own = False
        self._left_over = 0

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        self.walk.forward(f"micro-batch {index}")

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch."""
        self.walk.backward(
            f"micro-batch {index}", before=self._enter, on_gradients=self._on_gradients
        )
        if last and not self._shards:
            for step in self.walk.steps:
                for param in step.owned:
                    if param.trainable:
                        self._put(full_name(step, param.name))
        if last or self._shards:
            self._finish()
        self._has_gradients = True

    def update(self) -> None:
        """Write the optimizer's step, the end of the gradients and the all-gather."""
        builder, plan, piece = self._builder, self._plan, self._partition.piece
        largest = self._partition.largest(self._rank)
        builder.add(Task(label="gradient norm", surge=((STEP, largest * NORM_BYTES),)))
        own = self._partition.whole(self._rank) * self._width
        flat = 0 if self._partition.is_one_view(self._rank) else piece * self._width
        builder.allocate(GRADIENTS, flat, "flatten gradients")
        if self._width == 2:
            builder.allocate(GRADIENTS, piece * 4, "gradients to fp32")
            builder.allocate(GRADIENTS, -flat, "drop flat bfloat16 gradients")
            flat = piece * 4
        if flat:
            builder.allocate(GRADIENTS, -own, "drop gradients")
        builder.add(
            Task(
                label="optimizer step",
                seconds=step_seconds(plan, self._costs, piece),
                # The piece is one parameter to the optimizer.
                surge=((STEP, step_surge(plan, self._costs, piece, piece)),),
            )
        )
        builder.allocate(GRADIENTS, -(flat or own), "drop gradients")
        self._gather_weights()

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
        if not self._has_bucket:
            self._has_bucket = True
            size = self._limit * self._width
            self._builder.allocate(BUCKETS, size, "allocate bucket")
        if self._shards:
            step = self.walk.steps[self._at]
            for gradient in gradients:
                self._put(full_name(step, gradient.param))
            self._free_moved()
        elif self._has_gradients:
            size = sum(g.elements for g in gradients) * self._width
            self._builder.allocate(GRADIENTS, -size, "accumulate gradient")

    def _put(self, name: str) -> None:
        """Move a gradient into the bucket; one that is larger stays where it is."""
        size = self._partition.size(name)
        if self._filled + size > self._limit:
            self._reduce()
        if size <= self._limit:
            self._moved += size
        self._bucket.append((name, size))
        self._filled += size

    def _free_moved(self) -> None:
        if self._moved:
            size = self._moved * self._width
            self._builder.allocate(GRADIENTS, -size, "copy into bucket")
        self._moved = 0

    def _reduce(self) -> None:
        if not self._bucket:
            return
        self._free_moved()
        copied = self._partition.copied((name for name, _ in self._bucket), self._limit)
        self._exchange(
            "all-reduce bucket",
            self._group.reduce(self._filled * self._width),
            copied * self._width,
        )
        owned = [size for name, size in self._bucket if self._owns(name)]
        if owned and not self._has_own:
            self._has_own = True
            own = self._partition.whole(self._rank) * self._width
            self._builder.allocate(GRADIENTS, own, "allocate gradients of this rank")
        large = sum(size for _, size in self._bucket if size > self._limit)
        if large and (owned or self._shards):
            size = large * self._width
            self._builder.allocate(GRADIENTS, -size, "drop gradient that is too large")
        else:
            # Stage 1 keeps the gradients of others to the end of the reduction.
            self._left_over += large
        self._bucket = []
        self._filled = 0

    def _owns(self, name: str) -> bool:
        return self._partition.owns(self._rank, name)

    def _finish(self) -> None:
        """Reduce the rest and let the bucket go (the epilogue of a backward)."""
        self._reduce()
        builder = self._builder
        if self._shards and self._has_gradients:
            size = self._partition.whole(self._rank) * self._width
            builder.allocate(GRADIENTS, -size, "accumulate gradients of this rank")
        builder.allocate(GRADIENTS, -self._left_over * self._width, "drop gradients")
        if self._has_bucket:
            builder.allocate(BUCKETS, -self._limit * self._width, "free bucket")
        self._left_over = 0
        self._has_bucket = False
        self._has_own = False

    def _exchange(self, label: str, seconds: float, surge: int) -> None:
        """Write a collective that the computing stream waits for."""
        task = self._builder.add(
            Task(
                label=label,
                stream=communication(self._costs),
                seconds=seconds,
                after=(self._builder.last,),
                surge=((BUCKETS, surge),),
            )
        )
        self._builder.add(Task(label=f"wait for {label}", after=(task,)))
