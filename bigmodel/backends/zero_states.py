"""Where a rank keeps its states, and how its optimizer steps: on the device or not.

Source: deepspeed 0.19, `runtime/zero/{stage_1_and_2,stage3}.py`. An offloaded optimizer
steps where its states are, in the machine's memory; copies between the two are issued
on the stream that computes, which therefore waits for them.
"""

from __future__ import annotations

from typing import final

from bigmodel.backends.host import copy_seconds, host_step_seconds
from bigmodel.backends.walk import (
    MASTERS,
    OPTIMIZER,
    STEP,
    optimizer_state_bytes,
    step_seconds,
    step_surge,
)
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
        self._apart = costs.cluster.device.kind == "cuda"
        self.offloaded = plan.offload.optimizer != "device"
        """Whether the plan keeps them in the machine's memory."""

    def hold(self, elements: int) -> None:
        """Hold masters and states of this many elements."""
        tier = self._plan.offload.optimizer
        self.keep(tier, MASTERS, elements * 4)
        self.keep(tier, OPTIMIZER, optimizer_state_bytes(self._plan, elements))

    def keep(self, tier: Tier, kind: str, num_bytes: int) -> None:
        """Hold bytes in a tier; a CPU's own memory is that of its machine."""
        if tier == "device" or not self._apart:
            self._builder.hold(kind, num_bytes)
        else:
            self._builder.hold_on_host(kind, num_bytes)

    def copy(self, label: str, num_bytes: int) -> None:
        """Write a copy between device and machine, if these are apart."""
        if not self._apart or not num_bytes:
            return
        task = self._builder.add(
            Task(
                label=label,
                stream="host",
                seconds=copy_seconds(self._costs.cluster, num_bytes),
                after=(self._builder.last,),
            )
        )
        self._builder.add(Task(label=f"wait for {label}", after=(task,)))

    def step(self, elements: int) -> None:
        """Write the optimizer's step over one flat parameter."""
        plan, costs, builder = self._plan, self._costs, self._builder
        if not (self.offloaded and self._apart):
            surge = step_surge(plan, costs, elements, elements)
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
