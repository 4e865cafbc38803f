"""The step of a model whose layers lie on several devices of one process.

A device waits until the one before it has handed over. A hidden state that crosses is
copied and then let go where it was made (autograd keeps nothing of a copy), and so is
its gradient on the way back. What else crosses (masks, rotary angles) is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigmodel.backends.gradient_sums import GradientSums
from bigmodel.backends.stepping import hold_states, step_task
from bigmodel.backends.walk import (
    GRADIENTS,
    Step,
    Walk,
    hold_batch,
    hold_inputs,
    hold_weights,
    steps_of,
    trainable,
)
from bigmodel.clusters import send_seconds
from bigmodel.models import Gradient, Param
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, Program, ProgramBuilder, Task

ACTIVATIONS = "activations"


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the program of every device.

    Args:
        plan: A plan of one process, with stages.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    builders = [ProgramBuilder((index,)) for index in range(plan.devices_per_process)]
    write(plan, costs, micro_batches, builders)
    return tuple(builder.build() for builder in builders)


def write(
    plan: Plan, costs: Costs, micro_batches: int, builders: Sequence[ProgramBuilder]
) -> None:
    """Write a step into the programs of the devices.

    Args:
        plan: The plan.
        costs: Of the model on the cluster.
        micro_batches: How many.
        builders: Of every device; the same one for devices that are one and the same.
    """
    steps = steps_of(plan, costs.model.sequence)
    places = device_of_steps(plan, steps)
    devices = [_Device(plan, costs, builder) for builder in builders]
    runs: list[_Run] = []
    for index, step in zip(places, steps, strict=True):
        if not runs or runs[-1].device is not devices[index]:
            runs.append(_Run(devices[index]))
        runs[-1].steps.append(step)
    for run in runs:
        run.walk = Walk(plan, costs, run.device.builder, run.steps)
        run.walk.ends_with_others = True
        run.device.hold(run.steps)
    hold_batch(builders[0], costs, plan)
    line = _Line(plan, costs, runs)
    if plan.stages is not None and plan.stages.schedule == "gpipe":
        for index in range(micro_batches):
            line.forward(index)
        for index in reversed(range(micro_batches)):
            line.backward(index)
    else:
        for index in range(micro_batches):
            line.forward(index)
            line.backward(index)
    for device in devices:
        device.update()


def device_of_steps(plan: Plan, steps: Sequence[Step]) -> list[int]:
    """Return the index of the device of every unit; `naive/placing.py` deals so."""
    numbers = {path: index for index, path in enumerate(plan.units)}
    places: list[int] = []
    for at, step in enumerate(steps):
        if step.placed.role == "before":
            place = 0
        elif step.placed.role == "after":
            place = plan.num_stages - 1
        else:
            path = step.placed.path
            if step.placed.role == "between":
                path = steps[at + 1].placed.path
            place = plan.stage_of(numbers[path])
        places.append(place)
    owners = {
        step.full_name(param): place
        for step, place in zip(steps, places, strict=True)
        for param in step.owned
    }
    tied = [param.tied_to for param in steps[-1].unit.params if param.tied_to]
    places[-1] = min([places[-1], *(owners[name] for name in tied)])
    return places


class _Run:
    """Units that run on one device without a break."""

    def __init__(self, device: _Device) -> None:
        self.device = device
        self.steps: list[Step] = []
        self.walk: Walk


class _Line:
    """Writes micro-batches through the runs of a model."""

    def __init__(self, plan: Plan, costs: Costs, runs: Sequence[_Run]) -> None:
        self._costs = costs
        self._runs = runs
        self._sizes = [
            costs.output_bytes(run.steps[-1].unit, plan.micro_batch) for run in runs
        ]

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        name = f"micro-batch {index}"
        for at, run in enumerate(self._runs):
            run.walk.forward(name)
            if at + 1 < len(self._runs):
                self._hand_over(at, at + 1, f"F{index}", self._sizes[at])
        for run in self._runs:
            run.walk.end("forward", name)

    def backward(self, index: int) -> None:
        """Write the backward of a micro-batch."""
        name = f"micro-batch {index}"
        for at, run in reversed(list(enumerate(self._runs))):
            run.device.backward(run.walk, name)
            if at:
                self._hand_over(at, at - 1, f"B{index}", self._sizes[at - 1])
        for run in self._runs:
            run.walk.end("backward", name)
            run.device.has_gradients = True

    def _hand_over(self, at: int, to: int, label: str, size: int) -> None:
        """Move a hidden state, or its gradient, to the device that needs it next."""
        source = self._runs[at].device.builder
        target = self._runs[to].device.builder
        if source is target:
            return
        message = f"{label} of part {at}"
        source.add(
            Task(
                label=f"copy {message}",
                stream="pipeline",
                seconds=send_seconds(self._costs.cluster, size, 1),
                after=(source.last,),
                change=((ACTIVATIONS, -size),),
                sends=message,
            )
        )
        target.add(
            Task(
                label=f"receive {message}",
                receives=message,
                change=((ACTIVATIONS, size),),
            )
        )


class _Device:
    """What one device holds and does in the optimizer's step."""

    def __init__(self, plan: Plan, costs: Costs, builder: ProgramBuilder) -> None:
        self.builder = builder
        self.has_gradients = False
        self._plan = plan
        self._costs = costs
        # fairscale's Pipe goes back through all micro-batches at once.
        pipe = plan.stages is not None and plan.stages.schedule == "gpipe"
        self._sums = GradientSums(plan, costs, builder, one_backward=pipe)
        self._params: list[Param] = []

    def hold(self, steps: Sequence[Step]) -> None:
        """Hold the weights and states of units."""
        params = trainable(steps)
        self._params += params
        hold_weights(self.builder, self._plan, steps)
        hold_states(self.builder, self._plan, [param.shape for param in params])
        hold_inputs(self.builder, self._costs, self._plan, steps, batch=False)

    def backward(self, walk: Walk, name: str) -> None:
        """Write the backward of units; gradients add up."""

        def on_gradients(gradients: tuple[Gradient, ...], task: int) -> None:
            sizes = [gradient.elements for gradient in gradients]
            self._sums.add(sizes, first=not self.has_gradients)

        walk.backward(name, on_gradients=on_gradients)

    def update(self) -> None:
        """Write the optimizer's step and the end of the gradients."""
        sizes = [param.elements for param in self._params]
        shapes = [param.shape for param in self._params]
        self._sums.finish(sizes)
        self.builder.add(step_task(self._plan, self._costs, shapes))
        self.builder.allocate(GRADIENTS, -sum(sizes) * 4, "drop gradients")
