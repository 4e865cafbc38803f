"""What ZeRO stage 3 does to memory on every rank.

Source: deepspeed 0.19, `runtime/zero/{stage3,partition_parameters}.py`, with
`overlap_comm`. For the whole run every rank holds

    a shard of the weights, each parameter padded to equal shards
    a fp32 copy of the trained ones, even of fp32 weights: `_create_fp32_partitions`
    compares a device with its name, so it never takes them for its own
    a shard of the gradients, in the weights' own type (`grad_partitions_flat_buffer`)
    the bucket, `reduce_bucket_size` elements whatever the model is
    weights of at most `PERSISTENT` elements, whole; they go for the optimizer's step

Gradients go through the bucket as they come; a full one is concatenated again, shard by
shard, for the reduce-scatter (`reduce_scatter_coalesced`), on a stream of its own. When
weights are gathered and let go is in `gathering.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import final

from bigmodel.backends.deepspeed.gathering import Coordinator, Event, Visit, Weight
from bigmodel.backends.deepspeed.modules import full_name, modules_of
from bigmodel.backends.deepspeed.zero12 import NORM_BYTES
from bigmodel.backends.part import AbstractPart
from bigmodel.backends.walk import (
    BUCKETS,
    GATHERED,
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
from bigmodel.models import Gradient, Param
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task
from bigmodel.simulator.program import Stream

PERSISTENT = 100_000
"""`param_persistence_threshold`, `runtime/zero/config.py`."""
SUB_GROUP = 1_000_000_000
"""`sub_group_size`: elements of shards that take the optimizer's step together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """Elements of shards on one rank."""

    weights: int
    trained: int
    largest: int
    """Of one trained parameter."""
    groups: tuple[int, ...]
    """Trained ones by the optimizer's sub-groups."""
    persistent: tuple[int, ...]
    """Of parameters that every rank holds whole, all shards of one together."""


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
        self._limit = plan.deepspeed.bucket_elements
        self._ranks = plan.mesh.shard
        self._group = group(costs.cluster, self._ranks)
        self._stream: Stream = communication(costs)
        self._shares = shares = _shares(walk, self._ranks)
        builder.hold(WEIGHTS, shares.weights * self._width)
        builder.hold(MASTERS, shares.trained * 4)
        builder.hold(OPTIMIZER, optimizer_state_bytes(plan, shares.trained))
        builder.hold(GRADIENTS, shares.trained * self._width)
        builder.hold(BUCKETS, self._limit * self._width)
        builder.hold(GATHERED, sum(shares.persistent) * self._width)
        hold_inputs(builder, costs, plan, walk.steps)
        self._leftovers = 0
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
            after=lambda at: self._leave(self._forwards[at]),
        )

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch; every one reduces its gradients."""
        self.walk.backward(
            f"micro-batch {index}",
            before=lambda at: self._arrive(self._backwards[at]),
            after=lambda at: self._leave(self._backwards[at]),
            on_gradients=self._on_gradients,
        )
        self._reduce(self._builder.last)
        # The epilogue synchronises the stream of reductions, after every micro-batch.
        self._builder.add(
            Task(label="wait for gradients", after=tuple(self._reductions))
        )
        self._reductions = []
        self._builder.allocate(GATHERED, -self._leftovers, "release what is left")

    def update(self) -> None:
        """Write the optimizer's step; persistent weights are let go meanwhile."""
        builder, shares = self._builder, self._shares
        persistent = sum(shares.persistent) * self._width
        builder.allocate(GATHERED, -persistent, "partition all weights")
        builder.add(
            Task(label="gradient norm", surge=((STEP, shares.largest * NORM_BYTES),))
        )
        for elements in shares.groups:
            self._step(elements)
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
                surge=((GATHERED, persistent + scratch(self._costs, max(sizes))),),
            )
        )
        builder.add(Task(label="wait for persistent weights", after=(task,)))

    def _step(self, elements: int) -> None:
        builder, plan = self._builder, self._plan
        builder.allocate(GRADIENTS, elements * self._width, "flatten gradients")
        if self._width == 2:
            builder.allocate(GRADIENTS, elements * 4, "gradients to fp32")
            builder.allocate(GRADIENTS, -elements * 2, "drop flat bfloat16 gradients")
        builder.add(
            Task(
                label="optimizer step",
                seconds=step_seconds(plan, self._costs, elements),
                # A sub-group is one parameter to the optimizer.
                surge=((STEP, step_surge(plan, self._costs, elements, elements)),),
            )
        )
        builder.allocate(GRADIENTS, -elements * 4, "drop flat gradients")

    def _arrive(self, visit: Visit) -> tuple[int, ...]:
        waits = [self._write(event) for event in visit.before]
        return tuple(task for task in waits if task is not None)

    def _write(self, event: Event) -> int | None:
        """Write an event; return the task that the unit must wait for, if any."""
        gathering = event.gathering
        size = gathering.flat * self._width
        if event.kind == "gather":
            self._gathers[gathering.number] = self._builder.add(
                Task(
                    label="all-gather weights",
                    stream=self._stream,
                    seconds=self._group.gather(size),
                    change=((GATHERED, size),),
                    surge=((GATHERED, size + scratch(self._costs, size)),),
                )
            )
            return None
        if event.kind == "drop":
            self._builder.allocate(GATHERED, -size, "free all-gather")
            return None
        return self._builder.add(
            Task(
                label="copy out weights",
                after=(self._gathers[gathering.number],),
                change=((GATHERED, gathering.copies * self._width),),
            )
        )

    def _leave(self, visit: Visit) -> None:
        if visit.released:
            size = visit.released * self._width
            self._builder.allocate(GATHERED, -size, "release weights")

    def _on_gradients(self, gradients: tuple[Gradient, ...], task: int) -> None:
        moved = 0
        for gradient in gradients:
            size = gradient.elements
            if self._bucket and self._filled + size > self._limit:
                self._free_moved(moved)
                moved = 0
                self._reduce(task)
            self._bucket.append(size)
            self._filled += size
            # A gradient that is larger than the bucket stays where it is.
            moved += size if size <= self._limit else 0
        self._free_moved(moved)

    def _free_moved(self, elements: int) -> None:
        if elements:
            size = elements * self._width
            self._builder.allocate(GRADIENTS, -size, "copy into bucket")

    def _reduce(self, after: int) -> None:
        if not self._bucket:
            return
        padded = [ceil(size / self._ranks) * self._ranks for size in self._bucket]
        size = sum(padded) * self._width
        in_place = len(padded) == 1 and padded == self._bucket
        copied = 0 if in_place else size
        large = sum(count for count in self._bucket if count > self._limit)
        self._reductions.append(
            self._builder.add(
                Task(
                    label="reduce-scatter bucket",
                    stream=self._stream,
                    seconds=self._group.gather(size),
                    after=(after,),
                    change=((GRADIENTS, -large * self._width),) if large else (),
                    surge=((BUCKETS, copied + scratch(self._costs, size)),),
                )
            )
        )
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
            again = inner if step.policy == "full" else ()
            order += [(visit, m) for m in (*own, *again, *reversed(inner))]
        weights = {
            full_name(step, p.name): Weight(
                elements=p.elements, padded=_padded(p, self._ranks)
            )
            for step in steps
            for p in step.owned
            if p.elements > PERSISTENT
        }
        if self._ranks == 1:
            weights = {}
        # No gradient leaves the first module, nor those that embed integers.
        last = max((i for i, (_, module) in enumerate(order) if module), default=0)
        unhooked = {last} | {
            i
            for i, (visit, _) in enumerate(order)
            if visit >= len(steps) and steps[visited[visit]].placed.role == "before"
        }
        coordinator = Coordinator(weights, order, unhooked)
        visits = coordinator.visits(len(visited))
        self._leftovers = coordinator.leftovers * self._width
        return dict(zip(visited[: len(steps)], visits, strict=False)), dict(
            zip(visited[len(steps) :], visits[len(steps) :], strict=True)
        )


def _shares(walk: Walk, ranks: int) -> _Shares:
    owned = [param for step in walk.steps for param in step.owned]
    trained = [_padded(p, ranks) // ranks for p in owned if p.trainable]
    return _Shares(
        weights=sum(_padded(p, ranks) // ranks for p in owned),
        trained=sum(trained),
        largest=max(trained, default=0),
        groups=tuple(_sub_groups(trained)),
        persistent=tuple(_padded(p, ranks) for p in owned if p.elements <= PERSISTENT),
    )


def _sub_groups(shares: list[int]) -> list[int]:
    """Return the elements of the sub-groups, each closed when it is large enough."""
    groups = [0]
    for share in shares:
        if groups[-1] >= SUB_GROUP:
            groups.append(0)
        groups[-1] += share
    return groups


def _padded(param: Param, ranks: int) -> int:
    return ceil(param.elements / ranks) * ranks
