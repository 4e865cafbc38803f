"""A stage without ZeRO: plain gradients, averaged once after the last backward.

Source: deepspeed 0.19, `buffered_allreduce_fallback` and `allreduce_bucket` in
`runtime/engine.py`. Gradients are copied into one flat tensor, in groups of more than
500 million elements, averaged there and copied back; with one data-parallel rank too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from bigmodel.backends.stepping import hold_states, step_task
from bigmodel.backends.walk import (
    BUCKETS,
    GRADIENTS,
    Walk,
    communication,
    hold_inputs,
    hold_weights,
    trainable,
    weight_bytes,
)
from bigmodel.clusters import group
from bigmodel.models import Gradient
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task

_GROUP = 500_000_000
"""`MEMORY_OPT_ALLREDUCE_SIZE`, in elements."""


@final
class ReducedStage:
    """What a rank holds of a stage, in fp32 or under autocast.

    Args:
        plan: The plan.
        costs: Of the model on the cluster.
        builder: The program that is written.
        walk: The units of the stage.
    """

    def __init__(
        self, plan: Plan, costs: Costs, builder: ProgramBuilder, walk: Walk
    ) -> None:
        self.walk = walk
        self._plan = plan
        self._costs = costs
        self._builder = builder
        self._width = weight_bytes(plan)
        params = trainable(walk.steps)
        self._shapes = [param.shape for param in params]
        self._sizes = [param.elements for param in params]
        self._has_gradients = False
        self.after_backward: Callable[[int], None] | None = None
        """Called with a unit's index after its backward."""
        hold_weights(builder, plan, walk.steps)
        hold_states(builder, plan, self._shapes)
        hold_inputs(builder, costs, plan, walk.steps, batch=False)

    def forward(self, index: int) -> None:
        """Write the forward of a micro-batch."""
        self.walk.forward(f"micro-batch {index}")

    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch; gradients add up."""

        def on_gradients(gradients: tuple[Gradient, ...], _: int) -> None:
            if self._has_gradients:
                size = sum(gradient.elements for gradient in gradients) * self._width
                self._builder.allocate(GRADIENTS, -size, "accumulate gradient")

        self.walk.backward(
            f"micro-batch {index}",
            after=self.after_backward,
            on_gradients=on_gradients,
        )
        self._has_gradients = True

    def reduce(self) -> None:
        """Write the average over the data-parallel ranks."""
        ranks = group(self._costs.cluster, self._plan.mesh.replicate)
        for sizes in self._groups():
            flat = sum(sizes) * self._width
            task = self._builder.add(
                Task(
                    label="all-reduce gradients",
                    stream=communication(self._costs),
                    seconds=ranks.reduce(flat),
                    after=(self._builder.last,),
                    surge=((BUCKETS, flat if len(sizes) > 1 else 0),),
                )
            )
            self._builder.add(Task(label="wait for gradients", after=(task,)))

    def update(self) -> None:
        """Write the optimizer's step and the end of the gradients."""
        self._builder.add(step_task(self._plan, self._costs, self._shapes))
        size = sum(self._sizes) * self._width
        self._builder.allocate(GRADIENTS, -size, "drop gradients")

    def _groups(self) -> list[list[int]]:
        groups: list[list[int]] = [[]]
        for size in self._sizes:
            groups[-1].append(size)
            if sum(groups[-1]) > _GROUP:
                groups.append([])
        return [sizes for sizes in groups if sizes]
