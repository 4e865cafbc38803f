"""The step of a model that torch.nn.DataParallel copies to the devices of a process.

Source: torch 2.13, `torch/nn/parallel/{data_parallel,replicate,_functions,comm}.py` and
`torch/csrc/cuda/comm.cpp`. Every forward sends all weights, packed into buffers of
10 MiB; what the others receive are views of those, so copies live until the backward
ends. The gradients of all copies are one node of the graph: all are whole before the
first is added up on the first device, which holds its own and the sums for a moment.
Outputs are gathered there too; their size is read off the largest tensor that the part
after the blocks makes. Nothing of this runs on CPUs, so nothing here was measured.
"""

from __future__ import annotations

from dataclasses import replace

from bigmodel.backends.gradient_sums import GradientSums
from bigmodel.backends.stepping import hold_states, step_task
from bigmodel.backends.walk import (
    BATCH,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    Walk,
    hold_inputs,
    hold_weights,
    steps_of,
    trainable,
    weight_bytes,
)
from bigmodel.clusters import group
from bigmodel.models import Gradient, Storage, Unit
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, Program, ProgramBuilder, Task
from bigmodel.units import MIB

PACKED = 10 * MIB
"""`buffer_size` of `broadcast_coalesced` and `reduce_add_coalesced`."""
OUTPUTS = "gathered outputs"


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the program of the first device, and that of all others.

    Args:
        plan: A plan of backend `dataparallel`.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    count = plan.devices_per_process
    first = _Device(plan, costs, ProgramBuilder((0,)))
    other = _Device(plan, costs, ProgramBuilder(tuple(range(1, count))))
    first.hold()
    outputs = largest_storage(costs.model.after, plan.micro_batch // count) * count
    for index in range(micro_batches):
        last = f"{index}"
        first.send_weights(last)
        other.receive_weights(last)
        for device in (first, other):
            device.walk.forward(f"micro-batch {index}")
        other.say(f"outputs {index}")
        first.gather_outputs(index, outputs)
        other.wait_for(f"loss {index}")
        for device in (first, other):
            device.backward(index)
        other.say(f"gradients {index}")
        first.add_up(index)
        first.builder.allocate(OUTPUTS, -outputs, "drop outputs")
        other.wait_for(f"sums {index}")
        other.drop_copies()
    first.update()
    return first.builder.build(), other.builder.build()


def largest_storage(unit: Unit, micro_batch: int) -> int:
    """Return the bytes of the largest tensor that a unit's forward makes."""
    return max(
        (
            event.size.at(micro_batch)
            for event in unit.phases["none"].forward.events
            if isinstance(event, Storage) and event.sign > 0
        ),
        default=0,
    )


class _Device:
    """Writes what one device does."""

    def __init__(self, plan: Plan, costs: Costs, builder: ProgramBuilder) -> None:
        self.builder = builder
        self._plan = plan
        self._costs = costs
        self._width = weight_bytes(plan)
        self._sums = GradientSums(plan, costs, builder)
        count = plan.devices_per_process
        part = replace(plan, micro_batch=plan.micro_batch // count)
        self._steps = steps_of(plan, costs.model.sequence)
        self.walk = Walk(part, costs, builder, self._steps)
        params = trainable(self._steps)
        self._shapes = [param.shape for param in params]
        self._sizes = [param.elements for param in params]
        self._trained = sum(self._sizes) * self._width
        self._weights = costs.model.elements * self._width
        self._buffers = sum(step.unit.buffer_bytes for step in self._steps)
        self._batch = costs.model.sample_bytes * part.micro_batch
        self._group = group(costs.cluster, count)
        self._has_gradients = False

    def hold(self) -> None:
        """Hold what the first device alone keeps."""
        hold_weights(self.builder, self._plan, self._steps)
        hold_states(self.builder, self._plan, self._shapes)
        hold_inputs(self.builder, self._costs, self._plan, self._steps)

    def send_weights(self, index: str) -> None:
        """Write the copy of all weights to the other devices."""
        self._transfer(
            Task(
                label="copy weights to the other devices",
                stream="communication",
                after=self._before(),
                seconds=self._group.gather(self._weights + self._buffers),
                surge=((GATHERED, min(PACKED, self._weights)),),
                sends=f"weights {index}",
            )
        )

    def receive_weights(self, index: str) -> None:
        """Write what a device gets for one forward."""
        self.builder.add(
            Task(
                label="receive weights",
                receives=f"weights {index}",
                change=(
                    (GATHERED, self._weights),
                    (BUFFERS, self._buffers),
                    (BATCH, self._batch),
                ),
            )
        )

    def gather_outputs(self, index: int, num_bytes: int) -> None:
        """Write the outputs of all devices on the first one."""
        count = self._plan.devices_per_process
        self._transfer(
            Task(
                label="gather outputs",
                stream="communication",
                after=self._before(),
                receives=f"outputs {index}",
                seconds=self._group.gather(num_bytes * (count - 1) / count),
                change=((OUTPUTS, num_bytes),),
                sends=f"loss {index}",
            )
        )

    def backward(self, index: int) -> None:
        """Write the backward; no gradient is let go before all are there."""

        def keep(gradients: tuple[Gradient, ...], task: int) -> None:
            pass

        self.walk.backward(f"micro-batch {index}", on_gradients=keep)

    def add_up(self, index: int) -> None:
        """Write the sum of the gradients of all devices, on the first one."""
        self._transfer(
            Task(
                label="add up gradients",
                stream="communication",
                after=self._before(),
                receives=f"gradients {index}",
                seconds=self._group.gather(self._trained),
                change=((GRADIENTS, self._trained),),
                surge=((GRADIENTS, self._trained + min(PACKED, self._trained)),),
                sends=f"sums {index}",
            )
        )
        self.builder.allocate(GRADIENTS, -self._trained, "drop gradients of one copy")
        self._sums.add(self._sizes, first=not self._has_gradients)
        self._has_gradients = True

    def drop_copies(self) -> None:
        """Write the end of everything that a device was given or made."""
        self.builder.add(
            Task(
                label="drop weights and gradients",
                change=(
                    (GATHERED, -self._weights),
                    (BUFFERS, -self._buffers),
                    (BATCH, -self._batch),
                    (GRADIENTS, -self._trained),
                ),
            )
        )

    def _before(self) -> tuple[int, ...]:
        return (self.builder.last,) if self.builder.last >= 0 else ()

    def _transfer(self, task: Task) -> None:
        index = self.builder.add(task)
        self.builder.add(Task(label=f"wait: {task.label}", after=(index,)))

    def say(self, message: str) -> None:
        """Write that others may go on."""
        self.builder.add(Task(label=message, sends=message))

    def wait_for(self, message: str) -> None:
        """Write a wait for the first device."""
        self.builder.add(Task(label=f"wait for {message}", receives=message))

    def update(self) -> None:
        """Write the optimizer's step and the end of the gradients."""
        elements = sum(self._sizes)
        self._sums.finish(self._sizes)
        self.builder.add(step_task(self._plan, self._costs, self._shapes))
        self.builder.allocate(GRADIENTS, -elements * 4, "drop gradients")
