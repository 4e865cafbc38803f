"""The step of torch's optimizers, as shadows write it.

The states of all parameters are made when the first step begins (`_init_group`). On
CUDA the step goes through all parameters at once (foreach), with copies of all of them;
on CPUs through one after another. Source: torch 2.13, `torch/optim/adam.py`; the
figures are rows of `models/optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from bigmodel.backends.walk import OPTIMIZER, STEP
from bigmodel.models import OPTIMIZERS, Shape
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task
from bigmodel.simulator.program import Holdings, single
from bigmodel.simulator.roofline import pass_seconds


def optimizer_state_bytes(plan: Plan, elements: float) -> int:
    """Return the bytes of the fp32 states that the optimizer keeps for flat parts."""
    return int(OPTIMIZERS.get(plan.optimizer).states * elements * 4)


def step_surge(plan: Plan, costs: Costs, sizes: Sequence[int]) -> int:
    """Return the bytes that an optimizer's step holds for a moment.

    Args:
        plan: Names the optimizer.
        costs: Says which device.
        sizes: Elements of the parameters that this rank steps, in the step's order.
    """
    row = OPTIMIZERS.get(plan.optimizer)
    return 4 * row.held_elements(sizes, costs.cluster.device.kind)


def step_seconds(plan: Plan, costs: Costs, elements: float) -> float:
    """Return the seconds of an optimizer's step over this many parameters."""
    row = OPTIMIZERS.get(plan.optimizer)
    return pass_seconds(row.passes * elements * 4, costs.cluster.device)


def hold_states(builder: ProgramBuilder, plan: Plan, shapes: Sequence[Shape]) -> None:
    """Hold the states of parameters, which the first `step_task` makes.

    Args:
        builder: The program that is written.
        plan: Names the optimizer.
        shapes: Of each parameter.
    """
    builder.hold(OPTIMIZER, sum(state_sizes(plan, shapes)), sizes=())


def step_task(
    plan: Plan,
    costs: Costs,
    shapes: Sequence[Shape],
    together: Sequence[Shape] = (),
) -> Task:
    """Return the step over these parameters.

    Args:
        plan: Names the optimizer.
        costs: Says which device.
        shapes: Of each parameter, in the step's order.
        together: Of all that the optimizer steps at once, where these are some of them:
            the stages of one rank share an optimizer.
    """
    sizes = [prod(shape) for shape in shapes]
    all_sizes = [prod(shape) for shape in together] or sizes
    kind = costs.cluster.device.kind
    return Task(
        label="optimizer step",
        seconds=step_seconds(plan, costs, sum(sizes)),
        surge=((STEP, step_surge(plan, costs, all_sizes)),),
        tensors=_copies(plan, all_sizes, kind),
        first=single(OPTIMIZER, state_sizes(plan, shapes)),
    )


def state_sizes(plan: Plan, shapes: Sequence[Shape]) -> list[int]:
    """Return the bytes of every state of parameters, those of each together."""
    row = OPTIMIZERS.get(plan.optimizer)
    return [4 * size for shape in shapes for size in row.state_elements(shape)]


def _copies(plan: Plan, sizes: Sequence[int], kind: str) -> Holdings:
    copies = OPTIMIZERS.get(plan.optimizer).copied_at_once(kind)
    made = [4 * size for _ in range(copies) for size in sizes]
    return single(STEP, (*made, *(-size for size in reversed(made))))
