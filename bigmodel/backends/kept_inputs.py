"""Inputs of recomputed units that are kept in the CPU's memory, as shadows write them.

Source: torch 2.13, `save_on_cpu` in `torch/autograd/graph.py`, around `checkpoint`. The
copies run in the order of the computing stream, which waits for them. A unit without
the only hold on its input (another unit saves it too) frees nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigmodel.backends.host import copy_seconds
from bigmodel.models import Storage
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task

ACTIVATIONS = "activations"


class KeptInputs:
    """Moves the inputs of units to the host after their forward, and back.

    Args:
        plan: The plan.
        costs: Of the model on the cluster; on CPUs nothing moves.
        builder: The program that is written.
        steps: The rank's units (`walk.Step`).
    """

    def __init__(
        self, plan: Plan, costs: Costs, builder: ProgramBuilder, steps: Sequence
    ) -> None:
        self._builder = builder
        self._cluster = costs.cluster
        moves = (
            plan.offload.activations == "cpu" and costs.cluster.device.kind == "cuda"
        )
        copied = [
            step.unit.input_bytes_per_sample * plan.micro_batch
            if moves and step.policy != "none"
            else 0
            for step in steps
        ]
        self._copied = copied
        """Bytes that travel, for every unit."""
        self._freed = [
            size if size and _only_holder(step, costs, plan, size) else 0
            for step, size in zip(steps, copied, strict=True)
        ]
        """Of these, what the device need not hold meanwhile."""
        if any(copied):
            builder.hold_on_host(ACTIVATIONS, sum(copied))

    def before_forward(self, index: int) -> None:
        """Write the copy to the host."""
        self._copy(index, "to the host", 0)

    def after_forward(self, index: int) -> None:
        """Write that the device lets go of the input."""
        if self._freed[index]:
            self._builder.allocate(ACTIVATIONS, -self._freed[index], "drop input")

    def before_backward(self, index: int) -> None:
        """Write the copy back."""
        self._copy(index, "from the host", self._freed[index])

    def _copy(self, index: int, where: str, change: int) -> None:
        size = self._copied[index]
        if not size:
            return
        before = (self._builder.last,) if self._builder.last >= 0 else ()
        copy = self._builder.add(
            Task(
                label=f"copy input {where}",
                stream="host",
                seconds=copy_seconds(self._cluster, size),
                after=before,
                change=((ACTIVATIONS, change),) if change else (),
            )
        )
        self._builder.add(Task(label="wait for the copy", after=(copy,)))


def _only_holder(step, costs: Costs, plan: Plan, size: int) -> bool:
    """Say whether a unit's own backward frees the input that it has kept."""
    unit, policy = step.unit, step.policy
    frees = sum(
        isinstance(event, Storage)
        and event.sign < 0
        and event.kind == "boundary"
        and event.partner is None
        and event.size.at(plan.micro_batch) == size
        for event in unit.phases[policy].backward.events
    )
    # The gradient of its output ends there too.
    return frees > (costs.output_bytes(unit, plan.micro_batch) == size)
