"""What `fully_shard` does to memory and time, to a model or to a pipeline stage.

Source: torch 2.13, `torch/distributed/fsdp/_fully_shard/`. Every block is a group, the
rest of the model is the root group. Weights are gathered before use
(`shard_gathers.py`), gradients reduced after a group's backward
(`shard_reductions.py`).

torch's pipeline stages postpone the reduction: until the last micro-batch weights stay
gathered after a backward, and whole gradients add up in the reduce type. A plan may
postpone it too; weights are then resharded after every backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from bigmodel.backends.part import AbstractPart
from bigmodel.backends.shard_gathers import ROOT, Gathers, offloads
from bigmodel.backends.shard_groups import full_name, is_ignored, partition
from bigmodel.backends.shard_reductions import Reductions
from bigmodel.backends.stepping import hold_states, optimizer_state_bytes
from bigmodel.backends.walk import (
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    Step,
    Walk,
    hold_inputs,
)
from bigmodel.models import Gradient, Shape
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder


@final
class Shards(AbstractPart):
    """A whole model, or a pipeline stage, sharded with `fully_shard`.

    Args:
        plan: The plan; its mesh says how many shards and replicas.
        costs: Of the model on the cluster.
        builder: The program that is written.
        walk: The units of this rank.
        postpone: The part is a stage: its gradients are reduced after the last
            micro-batch only, and its weights stay gathered until then.
        batch: Whether the batch is held here, and not by several parts' owner.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        builder: ProgramBuilder,
        walk: Walk,
        *,
        postpone: bool = False,
        batch: bool = True,
    ) -> None:
        self.walk = walk
        self._parts = parts = partition(plan, walk.steps)
        self._ignored = plan.fsdp2.ignored
        self._stays_gathered = postpone
        self._postpone = postpone or plan.fsdp2.postpone_reduction
        self._gathers = Gathers(plan, costs, builder, parts)
        self._reductions = Reductions(plan, costs, builder, parts)
        self._adds_up = False
        """Whether a micro-batch before has left whole gradients of shards."""
        self._later = False
        """Whether there was a micro-batch before."""
        self._at = ROOT
        self._unhooked = _unhooked(walk.steps)
        shards = sum(unit.padded for unit in parts.groups) / plan.mesh.shard
        kept = sum(param.elements for param in parts.whole)
        trained = self._reductions.shards + self._reductions.whole
        states = optimizer_state_bytes(plan, trained)
        if offloads(plan, costs):
            builder.hold_on_host(WEIGHTS, shards * 4)
            builder.hold_on_host(GRADIENTS, trained * 4)
            builder.hold_on_host(OPTIMIZER, states)
        else:
            padded = [size for unit in parts.groups for size in unit.sizes]
            sizes = [4 * size // plan.mesh.shard for size in padded]
            sizes += [4 * param.elements for param in parts.whole]
            builder.hold(WEIGHTS, (shards + kept) * 4, sizes)
            hold_states(builder, plan, self.stepped)
        hold_inputs(builder, costs, plan, walk.steps, batch=batch)

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        self._gathers.before_forward(ROOT)
        self.walk.forward(
            f"micro-batch {index}",
            before=self._gathers.before_forward,
            after=self._gathers.after_forward,
        )
        self._gathers.end_forward()

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch."""
        reduce = last or not self._postpone

        def after(at: int) -> None:
            if at != self._unhooked:
                self._after_backward(at, reduce, last)

        self._gathers.begin_backward()
        self.walk.backward(
            f"micro-batch {index}",
            before=self._before_backward,
            after=after,
            on_gradients=self._add_up if self._later else None,
        )
        self._after_backward(ROOT, reduce, last)
        if self._unhooked is not None:
            self._after_backward(self._unhooked, reduce, last)
        self._reductions.end_backward(last=last, reduced=reduce)
        self._later = not last and bool(self._postpone or self._parts.whole)
        self._adds_up = not last and self._postpone and self._reductions.in_place

    def update(self) -> None:
        """Write the optimizer's step and the end of the gradients."""
        self.step()
        self.drop_gradients()

    @property
    def stepped(self) -> list[Shape]:
        """Shapes of what this rank steps, each a shard in one dimension."""
        return [(size,) for size in self._parts.stepped]

    def step(self, together: Sequence[Shape] = ()) -> None:
        """Write the optimizer's step; see `stepping.step_task`."""
        self._reductions.step(self.stepped, together)

    def drop_gradients(self) -> None:
        """Write the end of the gradients."""
        self._reductions.drop_gradients()

    def _before_backward(self, at: int) -> tuple[int, ...]:
        self._at = at
        return self._gathers.before_backward(at)

    def _after_backward(self, at: int, reduce: bool, last: bool) -> None:
        unit = self._parts.root if at == ROOT else self._parts.blocks[at]
        if unit is None:
            return
        self._reductions.accumulate(unit, keep=not reduce)
        if reduce or not self._stays_gathered:
            self._gathers.reshard(at)
        if reduce:
            self._reductions.reduce(unit, last=last)

    def _add_up(self, gradients: tuple[Gradient, ...], task: int) -> None:
        """Free gradients that were added to those of the micro-batches before."""
        placed = self.walk.steps[self._at].placed
        for gradient in gradients:
            name = full_name(placed, gradient.param)
            if self._adds_up or is_ignored(name, self._ignored):
                self._reductions.add_up(gradient.elements)


def _unhooked(steps: Sequence[Step]) -> int | None:
    """Return the unit that autograd does not tell when its backward has ended.

    No gradient leaves the first one that trains. Its group is reduced by the root's
    callback, after the root (`_root_post_backward_final_callback` in torch 2.13).
    """
    first = next(
        (
            index
            for index, step in enumerate(steps)
            if step.unit.phases[step.tapes].backward.events
        ),
        None,
    )
    if first is None or steps[first].placed.role != "block":
        return None
    return None if steps[first].receives_input else first
