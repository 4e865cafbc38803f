"""Weights that `fully_shard` gathers, ahead of use and for as long as they are used.

Source: torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`. For a
group of u bytes of unsharded weights:

    forward    all-gather output u, copied out into unsharded weights u; the output is
               kept until the next group has copied out (implicit prefetch)
    backward   the next group's all-gather output is already there and goes once it is
               copied out

With a deeper prefetch the outputs of the next groups are there in both directions. The
root's weights stay gathered from forward to backward, whatever the policy.
"""

from __future__ import annotations

from typing import final

from bigmodel.backends.host import copy_seconds
from bigmodel.backends.shard_groups import Partition, ShardGroup
from bigmodel.backends.walk import GATHERED, communication, scratch, weight_bytes
from bigmodel.clusters import group
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task
from bigmodel.simulator.program import Stream, single

POOL = "all-gather"
"""torch makes the outputs on a stream of its own (`all_gather_copy_in_stream`)."""
ROOT = -1
"""Index of the root group, where those of the blocks are indices of units."""


@final
class Gathers:
    """Writes all-gathers and what they hold.

    Args:
        plan: The plan.
        costs: Of the model on the cluster.
        builder: The program that is written.
        parts: The groups.
    """

    def __init__(
        self, plan: Plan, costs: Costs, builder: ProgramBuilder, parts: Partition
    ) -> None:
        self._costs = costs
        self._builder = builder
        self._groups = {ROOT: parts.root} | {
            at: unit for at, unit in enumerate(parts.blocks) if unit
        }
        self._policy = plan.fsdp2.reshard_after_forward
        self._depth = plan.fsdp2.prefetch
        self._width = weight_bytes(plan)
        self._ranks = plan.mesh.shard
        self._stream: Stream = communication(costs)
        self._offloads = offloads(plan, costs)
        self._gathered: set[int] = set()
        self._fetched: dict[int, int] = {}
        """All-gathers whose outputs have not been copied out, by group."""
        self._smaller: set[int] = set()
        """Groups that were resharded to fewer ranks."""
        self._output = ROOT
        self._keeps_output = False

    def before_forward(self, at: int) -> tuple[int, ...]:
        """Gather a unit's weights; return what its forward waits for."""
        waits = self._unshard(at)
        if waits:
            self.end_forward()
            self._output, self._keeps_output = at, True
        if self._depth > 1 and at in self._groups:
            later = [index for index in self._groups if index > at]
            self._fetch(sorted(later)[: self._depth])
        return waits

    def after_forward(self, at: int) -> None:
        """Free a unit's weights, or all but what a smaller group shares."""
        if at not in self._gathered or self._policy is False:
            return
        if not isinstance(self._policy, bool):
            unit, size = self._groups[at], self._bytes(self._groups[at])
            self._builder.allocate(
                GATHERED, size // self._policy, f"reshard to fewer ranks {unit.label}"
            )
            self._smaller.add(at)
        self.reshard(at)

    def end_forward(self) -> None:
        """Free the all-gather output that the last copy-out has left."""
        if self._keeps_output:
            self._free_output(self._output)
        self._keeps_output = False

    def begin_backward(self) -> None:
        """Let the root's backward fetch the last units."""
        # Without parameters of its own the root has nothing that would fetch by itself.
        if self._depth > 1 or self._groups[ROOT].padded:
            self._fetch_before(max(self._groups) + 1)

    def before_backward(self, at: int) -> tuple[int, ...]:
        """Gather a unit's weights again, and fetch those that come next."""
        waits = self._unshard(at)
        if waits:
            self._free_output(at)
        if at in self._groups:
            self._fetch_before(at)
        return waits

    def reshard(self, at: int) -> None:
        """Free a unit's gathered weights."""
        if at in self._gathered:
            unit = self._groups[at]
            label = f"reshard {unit.label}"
            sizes = [-size * self._width for size in unit.sizes]
            self._builder.allocate(
                GATHERED, -self._bytes(unit), label, sizes, unit=unit.label
            )
            self._gathered.discard(at)

    def _unshard(self, at: int) -> tuple[int, ...]:
        unit = self._groups.get(at)
        if not unit or not unit.padded or at in self._gathered:
            return ()
        fetched = self._fetched.pop(at, None)
        gather = self._all_gather(at) if fetched is None else fetched
        copied = self._builder.add(
            Task(
                label=f"copy out {unit.label}",
                after=(gather,),
                change=((GATHERED, self._bytes(unit)),),
                tensors=single(GATHERED, (n * self._width for n in unit.sizes)),
                unit=unit.label,
            )
        )
        if at in self._smaller:
            self._smaller.discard(at)
            share = self._bytes(unit) // self._policy
            self._free(share, f"free shards of fewer ranks {unit.label}")
        self._gathered.add(at)
        return (copied,)

    def _fetch_before(self, at: int) -> None:
        earlier = [index for index in self._groups if ROOT < index < at]
        self._fetch(sorted(earlier, reverse=True)[: self._depth])

    def _fetch(self, indices: list[int]) -> None:
        for index in indices:
            if index not in self._gathered and index not in self._fetched:
                self._fetched[index] = self._all_gather(index)

    def _all_gather(self, at: int) -> int:
        unit = self._groups[at]
        ranks = self._policy if at in self._smaller else self._ranks
        size = self._output_bytes(unit)
        # A shard is cast to the computing type before it is sent; one that a smaller
        # group shares has that type and is copied all the same.
        cast = size // ranks if self._width == 2 else 0
        waits: tuple[int, ...] = ()
        if self._offloads and at not in self._smaller:
            # Copied as fp32, and cast one parameter after the other.
            single = 4 * unit.largest // ranks if self._width == 2 else 0
            cast = size // ranks + single
            waits = (self._from_host(unit),)
        return self._builder.add(
            Task(
                label=f"all-gather {unit.label}",
                stream=self._stream,
                seconds=group(self._costs.cluster, ranks).gather(size),
                after=waits,
                change=((GATHERED, size),),
                surge=((GATHERED, size + cast + self._scratch(size)),),
                pool=POOL,
                unit=unit.label,
            )
        )

    def _from_host(self, unit: ShardGroup) -> int:
        size = 4 * unit.padded // self._ranks
        return self._builder.add(
            Task(
                label=f"weights from the host {unit.label}",
                stream="host",
                seconds=copy_seconds(self._costs.cluster, size),
            )
        )

    def _scratch(self, size: int) -> int:
        return scratch(self._costs, size) if self._ranks > 1 else 0

    def _bytes(self, unit: ShardGroup) -> int:
        return unit.padded * self._width

    def _output_bytes(self, unit: ShardGroup) -> int:
        """Return the bytes of an all-gather's output; a single rank has none."""
        return self._bytes(unit) if self._ranks > 1 else 0

    def _free_output(self, at: int) -> None:
        unit = self._groups[at]
        size, label = self._output_bytes(unit), f"free all-gather {unit.label}"
        self._builder.allocate(GATHERED, -size, label, pool=POOL, unit=unit.label)

    def _free(self, size: int, label: str) -> None:
        self._builder.allocate(GATHERED, -size, label)


def offloads(plan: Plan, costs: Costs) -> bool:
    """Say whether shards lie in host memory; on the CPU that is where they are."""
    return plan.offload.parameters == "cpu" and costs.cluster.device.kind == "cuda"
