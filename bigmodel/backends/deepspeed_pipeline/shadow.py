"""The step of a model that DeepSpeed's pipeline engine trains.

Source: deepspeed 0.19, `runtime/pipe/{engine,schedule}.py`. What a stage keeps of a
micro-batch, beside what autograd does:

    first stage     a copy of the input (`_exec_load_micro_batch`), and a copy of that,
                    which the first layer is given (`_exec_forward_pass`)
    other stages    a copy of what was received, until its gradient is sent
                    (`_exec_recv_activations`), the copy of that for the first layer,
                    and the gradient, until it is sent
    all             the output, to the end of the micro-batch's backward

Buffers to receive into are made once; what is received forward and backward lies in the
same one, if it is not larger (`_allocate_or_extend_buffers`). Of the batch a model does
not say what is its input: the first stage's copies are predicted as large as all of it.

Sends and receives are on the stream that computes, because torch lets it wait for them.
An activation is sent after the gradient that comes meanwhile was received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigmodel.backends.deepspeed_pipeline.reduced_stage import ReducedStage
from bigmodel.backends.flat_partition import FlatPartition
from bigmodel.backends.flat_zero import FlatZero
from bigmodel.backends.stage_units import stage_sequence
from bigmodel.backends.walk import (
    GRADIENTS,
    Step,
    Walk,
    hold_batch,
    steps_of,
    trainable,
    weight_bytes,
)
from bigmodel.clusters import send_seconds
from bigmodel.models import Storage
from bigmodel.plans import Plan
from bigmodel.schedules import SCHEDULES, Action
from bigmodel.simulator import Costs, Program, ProgramBuilder, Task

RECEIVED = "receive buffers"
ACTIVATIONS = "activations"
APART = 8
"""Data-parallel ranks up to which each is simulated by itself."""


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the programs of the stages, under ZeRO one for every kind of rank.

    Args:
        plan: A plan of backend `deepspeed_pipeline`.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    count = plan.mesh.pipeline
    rows = SCHEDULES.get("1f1b").rows(count, count, micro_batches)
    found: list[Program] = []
    for stage, row in enumerate(rows):
        if not plan.zero_stage:
            found.append(_StageProgram(plan, costs, stage).write(row))
            continue
        steps = stage_steps(plan, costs, stage)
        sizes = {
            step.full_name(p): p.elements for step in steps for p in trainable([step])
        }
        partition = FlatPartition(sizes, plan.mesh.shard)
        ranks = plan.mesh.stage_ranks(stage)
        for share, same in partition.kinds(APART).items():
            program = _StageProgram(plan, costs, stage, partition, share).write(row)
            found.append(replace(program, ranks=tuple(ranks[index] for index in same)))
    return tuple(found)


def stage_steps(plan: Plan, costs: Costs, stage: int) -> tuple[Step, ...]:
    """Return the units of a stage, which is given copies of what it receives."""
    steps = list(steps_of(plan, stage_sequence(plan, costs.model, stage)))
    if stage:
        steps[0] = replace(steps[0], receives_input=True)
    if stage < plan.num_stages - 1:
        steps[-1] = replace(steps[-1], receives_gradient=True)
    return tuple(steps)


class _StageProgram:
    """Writes the program of one rank.

    Args:
        plan: The plan.
        costs: Of the model on the cluster.
        stage: Which stage the rank holds.
        partition: Under ZeRO, that of the stage's trained parameters.
        share: Which piece of it the rank owns.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        stage: int,
        partition: FlatPartition | None = None,
        share: int = 0,
    ) -> None:
        self._plan = plan
        self._costs = costs
        self._stage = stage
        self._first = stage == 0
        self._last = stage == plan.num_stages - 1
        self._builder = builder = ProgramBuilder()
        steps = stage_steps(plan, costs, stage)
        walk = Walk(plan, costs, builder, steps)
        blocks = [step for step in steps if step.placed.role != "after"]
        self._leaving = costs.output_bytes(blocks[-1].unit, plan.micro_batch)
        # A model does not say which of the batch is its input; never too low.
        self._entering = costs.model.sample_bytes * plan.micro_batch
        if not self._first:
            size = steps[0].unit.input_bytes_per_sample
            self._entering = size * plan.micro_batch
        self._keeps_input = not _drops(steps[:1], self._entering, plan.micro_batch)
        builder.hold(RECEIVED, self._buffers())
        hold_batch(builder, costs, plan)
        # Where the tape drops the output before its micro-batch has ended.
        self._drops_output = self._last and _drops(
            steps[-2:], self._leaving, plan.micro_batch
        )
        residue = walk.residue()
        expected = sum(p.elements for p in trainable(steps)) * weight_bytes(plan)
        self._own_gradient = expected - residue.pop(GRADIENTS, 0)
        self._kept = sum(residue.values())
        self._part = (
            ReducedStage(plan, costs, builder, walk)
            if partition is None
            else FlatZero(plan, costs, builder, walk, partition, share, pipelined=True)
        )
        self._part.after_backward = self._after_backward
        self._saved_output = 0
        if not self._last and self._kept < self._leaving + self._handed_back:
            self._saved_output = self._leaving
        self._pending: tuple[str, int] | None = None

    @property
    def _handed_back(self) -> int:
        return 0 if self._first else self._entering

    def _after_backward(self, at: int) -> None:
        # Its unit drops an output that it has saved, and DeepSpeed still has it.
        if self._saved_output and at == len(self._part.walk.steps) - 1:
            self._keep(self._saved_output, "keep the output")

    def write(self, row: tuple[Action, ...]) -> Program:
        """Write the actions of the rank and the optimizer's step."""
        last = max(action.micro_batch for action in row)
        for action in row:
            if action.phase == "F":
                self._forward(action.micro_batch)
            else:
                self._backward(action.micro_batch, last=action.micro_batch == last)
        self._flush()
        self._part.reduce()
        self._part.update()
        return self._builder.build()

    def _forward(self, index: int) -> None:
        self._flush()
        if self._first:
            self._keep(self._entering, "load the input")
        else:
            self._receive(f"F{self._stage}.{index}")
            self._keep(self._entering, "copy what was received")
        self._keep(self._entering, "copy the input")
        self._part.forward(index)
        if not self._keeps_input:
            self._keep(-self._entering, "drop the copy of the input")
        if self._drops_output:
            self._keep(self._leaving, "keep the output")
        if not self._last:
            self._pending = f"F{self._stage + 1}.{index}", self._leaving

    def _backward(self, index: int, *, last: bool) -> None:
        if not self._last:
            # In the steady state a gradient is received, then an activation sent.
            ahead = index + self._plan.num_stages - 1 - self._stage
            if self._pending and self._pending[0] != f"F{self._stage + 1}.{ahead}":
                self._flush()
            self._receive(f"B{self._stage}.{index}")
        self._flush()
        self._part.backward(index, last=last)
        if self._own_gradient:
            label = "gradient of the tied weight"
            self._builder.allocate(GRADIENTS, self._own_gradient, label)
        if self._keeps_input:
            self._keep(-self._entering, "drop the copy of the input")
        left = self._kept + self._saved_output
        if self._drops_output:
            left += self._leaving
        if self._first:
            left += self._entering
        else:
            left -= self._entering
            self._pending = f"B{self._stage - 1}.{index}", self._entering
        if left:
            self._keep(-left, "drop what was kept")

    def _flush(self) -> None:
        """Send what is to be sent; a gradient goes, with what it is the gradient of."""
        if self._pending is None:
            return
        (message, size), self._pending = self._pending, None
        self._builder.add(
            Task(
                label=f"send {message}",
                seconds=send_seconds(
                    self._costs.cluster, size, self._plan.mesh.data_parallel
                ),
                sends=message,
            )
        )
        if message.startswith("B"):
            self._keep(-2 * size, "drop the input and its gradient")

    def _receive(self, message: str) -> None:
        self._builder.add(Task(label=f"receive {message}", receives=message))

    def _keep(self, size: int, label: str) -> None:
        self._builder.allocate(ACTIVATIONS, size, label)

    def _buffers(self) -> int:
        forward = 0 if self._first else self._entering
        backward = 0 if self._last else self._leaving
        return forward + (backward if backward > forward else 0)


def _drops(steps: Sequence[Step], size: int, micro_batch: int) -> bool:
    """Say whether what passes between units is dropped in these units' forward.

    The trace sees the end of a tensor that autograd does not keep within the forward of
    the unit that reads it, or at the end of the whole forward.
    """
    return any(
        isinstance(event, Storage)
        and event.sign < 0
        and event.kind == "boundary"
        and event.size.at(micro_batch) == size
        for step in steps
        for phase in ("forward", "forward_end")
        for event in getattr(step.unit.phases[step.tapes], phase).events
    )
