"""Where a rank keeps its states, and how its optimizer steps: on the device or not.

Source: deepspeed 0.19, `runtime/zero/{stage_1_and_2,stage3}.py`. An offloaded optimizer
steps in the machine's memory, states on a disk are read for it and written back; copies
between the tiers are issued on the stream that computes, which waits for them.
"""

from __future__ import annotations

from typing import final

from bigmodel.backends.host import copy_seconds, disk_seconds, host_step_seconds
from bigmodel.backends.stepping import (
    optimizer_state_bytes,
    state_sizes,
    step_seconds,
    step_surge,
)
from bigmodel.backends.walk import MASTERS, OPTIMIZER, STEP
from bigmodel.plans import Plan
from bigmodel.plans.options.offload import Tier
from bigmodel.simulator import Costs, ProgramBuilder, Task


@final
class States:
    """The fp32 masters and optimizer states of a rank.

    Args:
        plan: The plan.
        costs: Of the model on the cluster.
        builder: The program that is written.
    """

    def __init__(self, plan: Plan, costs: Costs, builder: ProgramBuilder) -> None:
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self.apart = costs.cluster.device.kind == "cuda"
        """Whether the device has a memory of its own."""
        self.offloaded = plan.offload.optimizer != "device"
        """Whether the plan keeps them in the machine's memory, or on its disk."""

    def hold(self, elements: int, tier: Tier | None = None) -> None:
        """Hold masters and states of this many elements, in the plan's tier."""
        tier = tier or self._plan.offload.optimizer
        self.keep(tier, MASTERS, elements * 4)
        # Made at once (`initialize_optimizer_states`), and not at the first step.
        states = optimizer_state_bytes(self._plan, elements)
        self.keep(tier, OPTIMIZER, states, state_sizes(self._plan, [(elements,)]))

    def keep(
        self, tier: Tier, kind: str, num_bytes: int, sizes: list[int] | None = None
    ) -> None:
        """Hold bytes in a tier; a CPU's own memory is that of its machine.

        Args:
            tier: Where.
            kind: Who holds them.
            num_bytes: How much.
            sizes: Bytes of the single tensors; None: it is one.
        """
        if tier == "disk":
            self._builder.hold_on_disk(kind, num_bytes)
        elif tier == "device" or not self.apart:
            self._builder.hold(kind, num_bytes, sizes)
        else:
            self._builder.hold_on_host(kind, num_bytes)

    def copy(self, label: str, num_bytes: int) -> None:
        """Write a copy between device and machine, if these are apart."""
        if self.apart:
            self._move(label, num_bytes, copy_seconds(self._costs.cluster, num_bytes))

    def disk(self, label: str, num_bytes: int) -> None:
        """Write that bytes are read from the machine's disk, or written to it."""
        self._move(label, num_bytes, disk_seconds(self._costs.cluster, num_bytes))

    def _move(self, label: str, num_bytes: int, seconds: float) -> None:
        if not num_bytes:
            return
        builder = self._builder
        # A step may begin with it: its first weights come from elsewhere.
        before = (builder.last,) if builder.last >= 0 else ()
        task = builder.add(
            Task(label=label, stream="host", seconds=seconds, after=before)
        )
        builder.add(Task(label=f"wait for {label}", after=(task,)))

    def step(self, elements: int) -> None:
        """Write the optimizer's step over one flat parameter."""
        plan, costs, builder = self._plan, self._costs, self._builder
        if not (self.offloaded and self.apart):
            surge = step_surge(plan, costs, [elements])
            builder.add(
                Task(
                    label="optimizer step",
                    seconds=step_seconds(plan, costs, elements),
                    surge=((STEP, surge),),
                )
            )
            return
        task = builder.add(
            Task(
                label="optimizer step on the host",
                stream="host",
                seconds=host_step_seconds(plan, costs.cluster, elements),
                after=(builder.last,),
            )
        )
        builder.add(Task(label="wait for the host", after=(task,)))
