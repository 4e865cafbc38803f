"""The step of a model that is cut into pipeline stages.

Source: torch 2.13, `torch/distributed/pipelining/{stage,schedules}.py`. Receive buffers
for all micro-batches are allocated once and stay: hidden states on every stage but the
first, their gradients on every stage but the last. Where the neighbour is on the same
rank, the buffer holds what that handed over last, until the next step replaces it.

What a stage sends is kept until the micro-batch's backward. Where that is split, the
gradient of an input that came from another rank stays to the next step: torch leaves it
on the receive buffer. Ranks differ, so there is one program for each.
"""

from __future__ import annotations

from dataclasses import replace

from bigmodel.backends.replicas import Replica
from bigmodel.backends.shards import Shards
from bigmodel.backends.stage_units import stage_sequence
from bigmodel.backends.walk import (
    GRADIENTS,
    SPLIT,
    Step,
    Walk,
    hold_batch,
    steps_of,
    trainable,
    weight_bytes,
)
from bigmodel.clusters import send_seconds
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
        stages = self._stages.values()
        for stage in stages:
            stage.end_schedule()
        together = [shape for stage in stages for shape in stage.part.stepped]
        for stage in stages:
            stage.part.step(together)
        for stage in stages:
            stage.part.drop_gradients()
            stage.end_step()
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
        self._receives = not self._first and stage - 1 not in held
        self._sends = not self._last and stage + 1 not in held
        self._hands_over = not self._last and not self._sends
        # gloo's sends hold their tensors; NCCL's let go when they are waited for.
        gloo = costs.cluster.device.kind == "cpu"
        name = plan.stages.schedule  # type: ignore[union-attr]
        self._schedule = SCHEDULES.get(name)
        self._waits_at_end = len(held) > 1 or (gloo and self._schedule.holds_all)
        self._until_end = self._until_next_step = 0
        self._alternates = name == "1f1b"
        self._warm_up = min(plan.num_stages - stage, plan.accumulation)
        self._keeps_warm_up = self._alternates and gloo and self._sends
        self._sent = 0
        steps = self._steps(held)
        self._entering = steps[0].unit.input_bytes_per_sample * plan.micro_batch
        self._leaving = costs.output_bytes(steps[-1].unit, plan.micro_batch)
        received = 0 if self._first else self._entering
        received += 0 if self._last else self._leaving
        builder.hold(RECEIVED, received * plan.accumulation)
        walk = Walk(plan, costs, builder, steps)
        made, self._kept = self._left_over(walk)
        expected = sum(p.elements for p in trainable(steps))
        # Those that two stages of this rank share are stepped in the first of them, and
        # their gradient appears in the last.
        for step in steps:
            moved = (p for p in step.unit.owned() if step.full_name(p) in step.settled)
            expected -= sum(p.elements for p in moved)
            expected += sum(p.elements for p in step.split if p not in step.owned)
        expected *= weight_bytes(plan)
        # In one process both uses of a tied weight share a gradient; here each stage
        # has its own, wherever the trace saw the shared one appear.
        self._own_gradient = expected - made
        self._handed_back = 0
        self._hold_unwritten(walk, plan.accumulation - micro_batches)
        if self._schedule.splits_backward and not self._first:
            _, kept = self._left_over(walk, SPLIT)
            self._handed_back = kept - (0 if self._last else self._leaving)
        self.part: Shards | Replica = (
            Shards(plan, costs, builder, walk, postpone=True, batch=False)
            if plan.mesh.shard > 1
            else Replica(plan, costs, builder, walk, batch=False)
        )

    def _hold_unwritten(self, walk: Walk, count: int) -> None:
        """Keep from the start what micro-batches that are not written would leave."""
        size = late = 0
        if self._schedule.holds_all:
            size = sum(walk.residue(phases=("forward", "forward_end")).values())
        elif self._waits_at_end:
            size = self._leaving if self._sends else 0
            backwards = self._entering if self._receives else 0
            if self._schedule.splits_backward:
                late = backwards
            else:
                size += backwards
        self._until_end = size * count
        self._until_next_step = late * count
        if self._until_end + self._until_next_step:
            kept = self._until_end + self._until_next_step
            self._keep(kept, "micro-batches before")

    def forward(self, micro_batch: int) -> None:
        """Write a forward, with what it receives and sends."""
        if self._receives:
            self._receive(f"F{self._stage}.{micro_batch}")
        self.part.forward(micro_batch)
        if self._sends:
            self._send(f"F{self._stage + 1}.{micro_batch}", self._leaving)
        elif self._hands_over:
            self._keep(-self._leaving, "replace what was handed over")

    def backward(self, micro_batch: int) -> None:
        """Write a backward, with what it receives and sends."""
        if self._sends:
            self._receive(f"B{self._stage}.{micro_batch}")
        self._rest_of_backward(micro_batch)
        if self._receives:
            self._send(f"B{self._stage - 1}.{micro_batch}", self._entering)
        if self._kept > 0:
            self._let_go(self._kept, micro_batch)

    def _let_go(self, kept: int, micro_batch: int) -> None:
        """Write the end of what a backward leaves: the output, the input's gradient."""
        handed_over = 0 if self._last or self._sends else self._leaving
        forwards = self._leaving if self._sends else 0
        backwards = kept - forwards - handed_over
        if self._waits_at_end:
            self._until_end += forwards + (backwards if self._receives else 0)
            freed = 0 if self._receives else backwards
        elif self._alternates:
            freed = self._let_go_in_turn(forwards, backwards, micro_batch)
        else:
            freed = forwards + backwards
        if freed:
            self._keep(-freed, "drop what was sent")

    def _let_go_in_turn(self, forwards: int, backwards: int, micro_batch: int) -> int:
        """Return what 1F1B frees after a backward.

        Its list of sends keeps the last gradient that was sent until the next one, and,
        with gloo, the send of the last output but one of the warm-up until its last
        forward is followed by a backward.
        """
        freed = forwards
        if self._receives:
            freed += self._sent
            self._sent = backwards
        else:
            freed += backwards
        if self._keeps_warm_up and self._warm_up > 1:
            if micro_batch == self._warm_up - 2:
                freed -= forwards
            if micro_batch == max(self._count - self._warm_up, self._warm_up - 2):
                freed += forwards
        return freed

    def backward_of_inputs(self, micro_batch: int) -> None:
        """Write the part of a backward that other stages wait for.

        Nobody waits for the first stage, which does all in the other part.
        """
        if self._sends:
            self._receive(f"B{self._stage}.{micro_batch}")
        if self._first:
            return
        self.part.walk.backward_of_inputs(f"micro-batch {micro_batch}")
        if self._receives:
            self._send(f"B{self._stage - 1}.{micro_batch}", self._entering)
            self._until_next_step += self._handed_back
        else:
            self._keep(-self._handed_back, "replace the gradient that was handed over")

    def backward_of_weights(self, micro_batch: int) -> None:
        """Write the rest of a backward, which frees what the forward kept."""
        if self._first:
            self._rest_of_backward(micro_batch)
        else:
            self._done += 1
            if not isinstance(self.part, Replica):
                raise ValueError("a split backward goes with stages alone")
            self.part.backward_of_weights(micro_batch, last=self._done == self._count)
        if self._sends:
            self._until_end += self._leaving

    def end_schedule(self) -> None:
        """Write the end of the sends, where the schedule waits for them only then."""
        sent = self._until_end + self._sent
        if sent:
            self._keep(-sent, "drop what was sent")

    def end_step(self) -> None:
        """Write the end of what torch keeps to the next step."""
        if self._until_next_step:
            self._keep(-self._until_next_step, "drop gradients of received inputs")

    def _left_over(self, walk: Walk, policy: str | None = None) -> tuple[int, int]:
        """Return the bytes of gradients and of the rest that a micro-batch leaves."""
        residue = walk.residue(policy)
        made = residue.pop(GRADIENTS, 0)
        return made, sum(residue.values())

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

    def _steps(self, held: tuple[int, ...]) -> tuple[Step, ...]:
        sequences = {
            stage: stage_sequence(self._plan, self._costs.model, stage)
            for stage in held
        }
        sequence = sequences.pop(self._stage)
        beside = [placed for other in sequences.values() for placed in other]
        steps = list(steps_of(self._plan, sequence, beside))
        if not self._first:
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
