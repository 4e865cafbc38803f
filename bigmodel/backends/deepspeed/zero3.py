"""What ZeRO stage 3 does to memory on every rank.

Source: deepspeed 0.19, `runtime/zero/{stage3,partition_parameters}.py`. For the whole
run every rank holds

    a shard of the weights, each parameter padded to equal shards
    a fp32 copy of the trained ones, even of fp32 weights: `_create_fp32_partitions`
    compares a device with its name, so it never takes them for its own
    a shard of the gradients, in the type in which they add up
    (`grad_partitions_flat_buffer`)
    the bucket, `reduce_bucket_size` elements whatever the model is
    weights of at most `param_persistence_threshold` elements, whole; they go for the
    optimizer's step

Gradients go through the bucket as they come; a full one is concatenated again, shard by
shard, for the reduce-scatter (`reduce_scatter_coalesced`), with `overlap_comm` on a
stream of its own. When weights are gathered and let go is in `gathering.py`.

Which of these are elsewhere when they are offloaded is in `tiers.py`. With
`zero_hpz_partition_size` a weight that is let go for the first time in a step leaves a
second shard, one of that many, from which it is gathered until the step's end
(`_partition_param_sec`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import final

from bigmodel.backends.deepspeed.disk import is_swapped
from bigmodel.backends.deepspeed.gathering import (
    Coordinator,
    Event,
    Visit,
    Weight,
    limits_of,
)
from bigmodel.backends.deepspeed.modules import Module, full_name, modules_of
from bigmodel.backends.deepspeed.shares import padded, shares_of
from bigmodel.backends.deepspeed.tiers import Tiers
from bigmodel.backends.deepspeed.zero3_linear import LinearOrder
from bigmodel.backends.flat_zero import NORM_BYTES
from bigmodel.backends.part import AbstractPart
from bigmodel.backends.walk import (
    BUCKETS,
    GATHERED,
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
from bigmodel.simulator.program import Stream, single


@final
class ShardedZero(AbstractPart):
    """A rank under ZeRO 3.

    Args:
        plan: The plan; its mesh says how many ranks share the model.
        costs: Of the model on the cluster.
        builder: The program that is written.
        walk: The units of the model.
    """

    def __init__(
        self, plan: Plan, costs: Costs, builder: ProgramBuilder, walk: Walk
    ) -> None:
        self.walk = walk
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._width = weight_bytes(plan)
        self._summed = BYTES[accumulation_type(plan)]
        self._sent = BYTES[communication_type(plan)]
        self._limit = plan.deepspeed.bucket_elements
        self._ranks = plan.mesh.shard
        self._group = group(costs.cluster, self._ranks)
        self._stream: Stream = communication(costs)
        self._overlaps = overlaps(plan)
        self._states = states = States(plan, costs, builder)
        self._shares = shares = shares_of(plan, walk.steps)
        self._tiers = Tiers(plan, states, builder, shares, self._ranks)
        self._tiers.hold()
        builder.hold(BUCKETS, self._limit * self._sent)
        whole = [count * self._width for count in shares.persistent]
        builder.hold(GATHERED, sum(whole), whole)
        hold_inputs(builder, costs, plan, walk.steps)
        self._last = False
        self._order = LinearOrder(walk.steps)
        self._at = 0
        self._waiting: dict[str, int] = {}
        """Weights of the unit that is in its backward, until it lets go of them."""
        self._near = plan.deepspeed.zero_hpz_partition_size
        self._near_group = group(costs.cluster, self._near)
        self._second = 0
        self._begun = False
        """Whether a micro-batch of the step has ended."""
        self._leftovers: tuple[int, ...] = ()
        self._leftovers_anew = 0
        self._pools = (
            ("all-gather", "reduction") if self._overlaps else ("compute",) * 2
        )
        """Streams on which what is gathered and what is reduced is made."""
        self._forwards, self._backwards = self._visits()
        self._gathers: dict[int, int] = {}
        self._bucket: list[int] = []
        self._filled = 0
        self._reductions: list[int] = []

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        self._gathers = {}
        self.walk.forward(
            f"micro-batch {index}",
            before=lambda at: self._arrive(self._forwards[at]),
            after=lambda at: self._leave(
                self._forwards[at], self._forwards[at].weights
            ),
        )

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch; every one reduces its gradients."""
        self._last = last
        self._order.begin()
        self.walk.backward(
            f"micro-batch {index}",
            before=self._turn_to,
            after=lambda at: self._leave(self._backwards[at], self._waiting),
            on_gradients=self._on_gradients,
        )
        self._reduce(self._builder.last)
        # The epilogue synchronises the stream of reductions, after every micro-batch.
        self._builder.add(
            Task(label="wait for gradients", after=tuple(self._reductions))
        )
        self._reductions = []
        self._release_leftovers()

    def _release_leftovers(self) -> None:
        self._release(self._leftovers, "release what is left")
        if not self._begun:
            self._keep_second(self._leftovers_anew)
        self._begun = True

    def update(self) -> None:
        """Write the optimizer's step; persistent weights are let go meanwhile."""
        builder, shares = self._builder, self._shares
        persistent = sum(shares.persistent) * self._width
        self._keep_second(sum(shares.persistent))
        builder.allocate(GATHERED, -persistent, "partition all weights")
        if not self._states.offloaded:
            surge = shares.largest * NORM_BYTES
            builder.add(Task(label="gradient norm", surge=((STEP, surge),)))
        for elements in shares.groups:
            self._step(elements)
        self._tiers.end_step()
        self._gather_persistent(persistent)
        if self._second:
            builder.allocate(WEIGHTS, -self._second, "drop second shards")

    def _gather_persistent(self, persistent: int) -> None:
        builder, shares = self._builder, self._shares
        if not shares.persistent:
            return
        if self._ranks == 1:
            builder.allocate(GATHERED, persistent, "gather persistent weights")
            return
        sizes = [count * self._width for count in shares.persistent]
        task = builder.add(
            Task(
                label="all-gather persistent weights",
                stream=self._stream,
                seconds=sum(self._group.gather(size) for size in sizes),
                after=(builder.last,),
                change=((GATHERED, persistent),),
                tensors=single(GATHERED, sizes),
                surge=((GATHERED, persistent + scratch(self._costs, max(sizes))),),
            )
        )
        builder.add(Task(label="wait for persistent weights", after=(task,)))

    def _step(self, elements: int) -> None:
        if self._states.offloaded:
            self._tiers.step(elements)
            return
        builder = self._builder
        flat = elements * self._summed
        builder.allocate(GRADIENTS, flat, "flatten gradients")
        if self._summed == 2:
            builder.allocate(GRADIENTS, elements * 4, "gradients to fp32")
            builder.allocate(GRADIENTS, -flat, "drop flat 16-bit gradients")
        self._states.step(elements)
        builder.allocate(GRADIENTS, -elements * 4, "drop flat gradients")

    def _turn_to(self, at: int) -> tuple[int, ...]:
        self._at = at
        self._waiting = dict(self._backwards[at].weights)
        return self._arrive(self._backwards[at])

    def _arrive(self, visit: Visit) -> tuple[int, ...]:
        waits = [self._write(event) for event in visit.before]
        return tuple(task for task in waits if task is not None)

    def _write(self, event: Event) -> int | None:
        """Write an event; return the task that the unit must wait for, if any."""
        gathering = event.gathering
        size = gathering.flat * self._width
        if event.kind == "gather":
            self._tiers.gather(size)
            # Second shards are there once a weight has gone, nearly.
            near = self._near > 1 and (self._begun or self._second > 0)
            self._gathers[gathering.number] = self._builder.add(
                Task(
                    label="all-gather weights",
                    stream=self._stream,
                    seconds=(self._near_group if near else self._group).gather(size),
                    change=((GATHERED, size),),
                    surge=((GATHERED, size + scratch(self._costs, size)),),
                    pool=self._pools[0],
                )
            )
            return None
        if event.kind == "drop":
            self._release((gathering.flat,), "free all-gather")
            return None
        copies = [count * self._width for count in gathering.copies]
        return self._builder.add(
            Task(
                label="copy out weights",
                after=(self._gathers[gathering.number],),
                change=((GATHERED, sum(copies)),),
                tensors=single(GATHERED, copies),
                pool=self._pools[0],
            )
        )

    def _leave(self, visit: Visit, weights: Mapping[str, int]) -> None:
        gone = (*visit.released, *weights.values())
        if gone:
            self._release(gone, "release weights")
        if not self._begun:
            self._keep_second(visit.shared_anew)

    def _release(self, elements: Sequence[int], label: str) -> None:
        gone = [-count * self._width for count in elements]
        self._builder.allocate(GATHERED, sum(gone), label, gone, self._pools[0])

    def _keep_second(self, elements: int) -> None:
        if self._near > 1 and elements:
            size = elements // self._near * self._width
            self._second += size
            self._builder.allocate(WEIGHTS, size, "second shards of weights")

    def _on_gradients(self, gradients: tuple[Gradient, ...], task: int) -> None:
        moved = 0
        for size in self._order.turn(self.walk.steps[self._at], gradients):
            if self._bucket and self._filled + size > self._limit:
                self._free_moved(moved)
                moved = 0
                self._reduce(task)
            self._bucket.append(size)
            self._filled += size
            # A gradient that is larger than the bucket stays where it is.
            moved += size if size <= self._limit else 0
        self._free_moved(moved)
        placed = self.walk.steps[self._at].placed
        names = (gradient_name(placed, gradient) for gradient in gradients)
        gone = [self._waiting.pop(name) for name in names if name in self._waiting]
        if gone:
            self._release(gone, "release weights")

    def _free_moved(self, elements: int) -> None:
        if elements:
            size = elements * self._width
            self._builder.allocate(GRADIENTS, -size, "copy into bucket")

    def _reduce(self, after: int) -> None:
        if not self._bucket:
            return
        sizes = [ceil(size / self._ranks) * self._ranks for size in self._bucket]
        shards = [count // self._ranks for count in sizes]
        size = sum(sizes) * self._sent
        flat = 0 if len(sizes) == 1 and sizes == self._bucket else size
        cast = 0 if self._sent == self._width else sum(self._bucket) * self._sent
        # Shards are parts of the flat buffer, or of a gradient, until they are cast.
        summed = 0 if self._sent == self._summed else sum(shards) * self._summed
        held = cast + flat + max(scratch(self._costs, size), summed)
        task = self._builder.add(
            Task(
                label="reduce-scatter bucket",
                stream=self._stream,
                seconds=self._group.gather(size),
                after=(after,),
                surge=((BUCKETS, held),),
                pool=self._pools[1],
            )
        )
        self._reductions.append(task)
        if not self._overlaps:
            self._builder.add(Task(label="wait for bucket", after=(task,)))
        self._tiers.take(shards, beside=summed or flat, last=self._last)
        large = sum(count for count in self._bucket if count > self._limit)
        if large:
            size = large * self._width
            self._builder.allocate(GRADIENTS, -size, "drop large gradients")
        self._bucket = []
        self._filled = 0

    def _visits(self) -> tuple[dict[int, Visit], dict[int, Visit]]:
        """Return the visits of forward and backward by the index of the unit."""
        steps = self.walk.steps
        seen: set[str] = set()
        modules = [modules_of(step, seen) for step in steps]
        order = [(at, module) for at in range(len(steps)) for module in modules[at]]
        visited = list(range(len(steps)))
        for at in reversed(range(len(steps))):
            visited.append(at)
            step, visit = steps[at], len(visited) - 1
            if not step.unit.phases[step.policy].backward.events:
                # Frozen, and so is all before it: autograd never comes here.
                continue
            own, inner = modules[at][:1], modules[at][1:]
            again = inner if step.policy != "none" else ()
            order += [(visit, m) for m in (*own, *again, *reversed(inner))]
        weights = {
            full_name(step, p.name): Weight(
                elements=p.elements, padded=padded(p, self._ranks)
            )
            for step in steps
            for p in step.owned
            if p.elements > self._plan.deepspeed.param_persistence_threshold
        }
        if self._ranks == 1:
            weights = {}
        if self._plan.offload.parameters == "disk":
            self._hold_shard_buffers(weights, modules)
        # No gradient leaves the first module, nor those that embed integers.
        last = max((i for i, (_, module) in enumerate(order) if module), default=0)
        unhooked = {last} | {
            i
            for i, (visit, _) in enumerate(order)
            if visit >= len(steps) and steps[visited[visit]].placed.role == "before"
        }
        coordinator = Coordinator(weights, order, unhooked, limits_of(self._plan))
        visits = coordinator.visits(len(visited))
        self._leftovers = coordinator.leftovers
        self._leftovers_anew = coordinator.leftovers_anew
        return dict(zip(visited[: len(steps)], visits, strict=False)), dict(
            zip(visited[len(steps) :], visits[len(steps) :], strict=True)
        )

    def _hold_shard_buffers(
        self, weights: dict[str, Weight], modules: list[tuple[Module, ...]]
    ) -> None:
        def count(module: Module) -> int:
            return sum(
                name in weights
                and is_swapped(weights[name].padded // self._ranks, self._width)
                for name in module
            )

        embeddings = sum(
            count(module)
            for step, inner in zip(self.walk.steps, modules, strict=True)
            if step.placed.role == "before"
            for module in inner
        )
        counts = (count(module) for inner in modules for module in inner)
        self._tiers.hold_shard_buffers(counts, embeddings)
