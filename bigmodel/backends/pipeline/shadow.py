"""The step of a model that is cut into pipeline stages.

Source: torch 2.13, `torch/distributed/pipelining/{stage,schedules}.py`. Receive buffers
for all micro-batches are allocated once and stay: hidden states on every stage but the
first, their gradients on every stage but the last. What a stage sends is kept until the
micro-batch's backward. Stages differ, so there is one program for each.
"""

from __future__ import annotations

from dataclasses import replace

from bigmodel.backends.replicas import Replica
from bigmodel.backends.shards import Shards
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
from bigmodel.models import Placed, Storage, Unit
from bigmodel.plans import Plan
from bigmodel.schedules import SCHEDULES, Action
from bigmodel.simulator import Costs, Program, ProgramBuilder, Task

RECEIVED = "receive buffers"
ACTIVATIONS = "activations"


def programs(plan: Plan, costs: Costs, micro_batches: int) -> tuple[Program, ...]:
    """Return the programs of the stages, first stage first.

    Args:
        plan: A plan of backend `pipeline`.
        costs: Of the model on the cluster.
        micro_batches: How many to write, at most the plan's accumulation.
    """
    if plan.stages is None:
        raise ValueError("a plan of backend 'pipeline' has stages")
    rows = SCHEDULES.get(plan.stages.schedule).rows(
        plan.mesh.pipeline, plan.num_stages, micro_batches
    )
    return tuple(
        _RankProgram(plan, costs, rank, micro_batches).write(row)
        for rank, row in enumerate(rows)
    )


def stage_sequence(plan: Plan, costs: Costs, stage: int) -> tuple[Placed, ...]:
    """Return the units of a stage in forward order."""
    owned = {plan.units[index] for index in plan.stage_units(stage)}
    count = plan.num_stages
    found: list[Placed] = []
    for index, placed in enumerate(costs.model.sequence):
        if placed.role == "before":
            belongs = stage == 0
        elif placed.role == "after":
            belongs = stage == count - 1
        elif placed.role == "between":
            # Runs before the block that follows it.
            belongs = costs.model.sequence[index + 1].path in owned
        else:
            belongs = placed.path in owned
        if belongs:
            found.append(placed)
    return tuple(found)


def makes_block_input(before: Unit) -> bool:
    """Say whether a model makes the blocks' input out of its embeddings.

    Every stage of a model of transformers runs its code before the blocks, with hidden
    states in place of the embeddings. Where that code adds something (GPT-2 its
    positions), the first block reads the sum, and not what was received.
    """
    tape = before.phases["none"].forward
    handed = [
        event.size.per_sample
        for event in tape.events
        if isinstance(event, Storage) and event.sign > 0 and event.kind == "boundary"
    ]
    return any(
        isinstance(event, Storage)
        and event.sign > 0
        and event.kind != "boundary"
        and event.size.per_sample in handed
        for event in tape.events
    )


class _RankProgram:
    """Writes the program of one rank of a pipeline, with all stages it holds."""

    def __init__(self, plan: Plan, costs: Costs, rank: int, micro_batches: int) -> None:
        self._builder = builder = ProgramBuilder()
        held = plan.rank_stages(rank)
        self._stages = {
            stage: _Stage(plan, costs, builder, stage, held, micro_batches)
            for stage in held
        }
        hold_batch(builder, costs, plan)

    def write(self, row: tuple[Action, ...]) -> Program:
        """Write the actions of the rank and the optimizer's step."""
        for action in row:
            stage, index = self._stages[action.stage], action.micro_batch
            if action.phase == "F":
                stage.forward(index)
            elif action.phase == "B":
                stage.backward(index)
            elif action.phase == "I":
                stage.backward_of_inputs(index)
            else:
                stage.backward_of_weights(index)
        parts = [stage.part for stage in self._stages.values()]
        for part in parts:
            part.step()
        for part in parts:
            part.drop_gradients()
        return self._builder.build()


class _Stage:
    """Writes what one stage of a rank does."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        builder: ProgramBuilder,
        stage: int,
        held: tuple[int, ...],
        micro_batches: int,
    ) -> None:
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._stage = stage
        self._count = micro_batches
        self._done = 0
        self._first = stage == 0
        self._last = stage == plan.num_stages - 1
        # A neighbour on the same rank is handed tensors, and needs no buffers.
        self._receives = not self._first and stage - 1 not in held
        self._sends = not self._last and stage + 1 not in held
        self._makes_input = makes_block_input(costs.model.before)
        steps = self._steps()
        self._entering = steps[0].unit.input_bytes_per_sample * plan.micro_batch
        self._leaving = costs.output_bytes(steps[-1].unit, plan.micro_batch)
        received = self._entering if self._receives else 0
        received += self._leaving if self._sends else 0
        builder.hold(RECEIVED, received * plan.accumulation)
        walk = Walk(plan, costs, builder, steps)
        self._half = walk.backward_seconds() / 2
        residue = walk.residue()
        made = residue.pop(GRADIENTS, 0)
        expected = sum(p.elements for p in trainable(steps)) * weight_bytes(plan)
        # In one process both uses of a tied weight share a gradient; here each stage
        # has its own, wherever the trace saw the shared one appear.
        self._own_gradient = expected - made
        self._kept = sum(residue.values())
        if self._makes_input and not self._first:
            self._kept += self._entering
        self.part: Shards | Replica = (
            Shards(plan, costs, builder, walk, postpone=True, batch=False)
            if plan.mesh.shard > 1
            else Replica(plan, costs, builder, walk, batch=False)
        )

    def forward(self, micro_batch: int) -> None:
        """Write a forward, with what it receives and sends."""
        if self._receives:
            self._receive(f"F{self._stage}.{micro_batch}")
        if not self._first and self._makes_input:
            self._keep(self._entering, "input of the first block")
        self.part.forward(micro_batch)
        if self._sends:
            self._send(f"F{self._stage + 1}.{micro_batch}", self._leaving)

    def backward(self, micro_batch: int) -> None:
        """Write a backward, with what it receives and sends."""
        if self._sends:
            self._receive(f"B{self._stage}.{micro_batch}")
        self._rest_of_backward(micro_batch)
        if self._receives:
            self._send(f"B{self._stage - 1}.{micro_batch}", self._entering)
        if self._kept > 0:
            self._keep(-self._kept, "drop what was sent")

    def backward_of_inputs(self, micro_batch: int) -> None:
        """Write the part of a backward that other stages wait for: half of its time.

        torch keeps the whole graph until the gradients of weights are made, so nothing
        is freed.
        """
        if self._sends:
            self._receive(f"B{self._stage}.{micro_batch}")
        self._builder.add(
            Task(
                label=f"backward of inputs, micro-batch {micro_batch}",
                seconds=self._half,
            )
        )
        if self._receives:
            self._send(f"B{self._stage - 1}.{micro_batch}", self._entering)

    def backward_of_weights(self, micro_batch: int) -> None:
        """Write the rest of a backward, which frees what the forward kept."""
        self.part.walk.backward_share = 0.5
        self._rest_of_backward(micro_batch)
        self.part.walk.backward_share = 1.0
        if self._kept > 0:
            self._keep(-self._kept, "drop what was sent")

    def _rest_of_backward(self, micro_batch: int) -> None:
        if self._kept < 0:
            self._keep(-self._kept, "gradient of the output")
        if self._own_gradient:
            self._builder.allocate(
                GRADIENTS, self._own_gradient, "gradient of the tied weight"
            )
        self._done += 1
        # Only the last one that ends reduces gradients.
        self.part.backward(micro_batch, last=self._done == self._count)

    def _steps(self) -> tuple[Step, ...]:
        sequence = stage_sequence(self._plan, self._costs, self._stage)
        steps = list(steps_of(self._plan, sequence))
        if not self._first and not self._makes_input:
            steps[0] = replace(steps[0], receives_input=True)
        if not self._last:
            steps[-1] = replace(steps[-1], receives_gradient=True)
        return tuple(steps)

    def _keep(self, size: int, label: str) -> None:
        self._builder.allocate(ACTIVATIONS, size, label)

    def _receive(self, message: str) -> None:
        self._builder.add(Task(label=f"receive {message}", receives=message))

    def _send(self, message: str, size: int) -> None:
        distance = self._plan.mesh.data_parallel
        self._builder.add(
            Task(
                label=f"send {message}",
                stream="pipeline",
                seconds=send_seconds(self._costs.cluster, size, distance),
                after=(self._builder.last,),
                sends=message,
            )
        )
