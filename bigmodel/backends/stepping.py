"""The step of torch's optimizers, as shadows write it.

The states of all parameters are made when the first step begins (`_init_group`). On
CUDA the step goes through all parameters at once (foreach), with copies of all of them;
on CPUs through one after another. Source: torch 2.13, `torch/optim/adam.py`; the
figures are rows of `models/optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bigmodel.backends.walk import OPTIMIZER, STEP
from bigmodel.models import OPTIMIZERS
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task
from bigmodel.simulator.program import Holdings, single
from bigmodel.simulator.roofline import pass_seconds


def optimizer_state_bytes(plan: Plan, elements: float) -> int:
    """Return the bytes of the fp32 states that the optimizer keeps."""
    return int(OPTIMIZERS.get(plan.optimizer).states * elements * 4)


def step_surge(plan: Plan, costs: Costs, sizes: Sequence[float]) -> int:
    """Return the bytes that an optimizer's step holds for a moment.

    Args:
        plan: Names the optimizer.
        costs: Says which device; CUDA takes the foreach form.
        sizes: Elements of the parameters that this rank steps, in the step's order.
    """
    row = OPTIMIZERS.get(plan.optimizer)
    if costs.cluster.device.kind == "cuda":
        return int(row.foreach_copies * sum(sizes) * 4)
    held = (
        row.loop_copies * size + row.loop_keeps * before
        for before, size in pairwise((0, *sizes))
    )
    return int(max(held, default=0) * 4)


def step_seconds(plan: Plan, costs: Costs, elements: float) -> float:
    """Return the seconds of an optimizer's step over this many parameters."""
    row = OPTIMIZERS.get(plan.optimizer)
    return pass_seconds(row.passes * elements * 4, costs.cluster.device)


def hold_states(builder: ProgramBuilder, plan: Plan, sizes: Sequence[int]) -> None:
    """Hold the states of parameters, which the first `step_task` makes.

    Args:
        builder: The program that is written.
        plan: Names the optimizer.
        sizes: Elements of each parameter.
    """
    builder.hold(OPTIMIZER, optimizer_state_bytes(plan, sum(sizes)), sizes=())


def step_task(plan: Plan, costs: Costs, sizes: Sequence[int]) -> Task:
    """Return the step over these parameters.

    Args:
        plan: Names the optimizer.
        costs: Says which device.
        sizes: Elements of each parameter, in the step's order.
    """
    return Task(
        label="optimizer step",
        seconds=step_seconds(plan, costs, sum(sizes)),
        surge=((STEP, step_surge(plan, costs, sizes)),),
        tensors=_copies(plan, sizes) if costs.cluster.device.kind == "cuda" else (),
        first=single(OPTIMIZER, state_sizes(plan, sizes)),
    )


def state_sizes(plan: Plan, sizes: Sequence[int]) -> list[int]:
    """Return the bytes of every state of parameters, those of each together."""
    states = OPTIMIZERS.get(plan.optimizer).states
    return [4 * size for size in sizes for _ in range(states)]


def _copies(plan: Plan, sizes: Sequence[int]) -> Holdings:
    copies = OPTIMIZERS.get(plan.optimizer).foreach_copies
    made = [4 * size for _ in range(copies) for size in sizes]
    return single(STEP, (*made, *(-size for size in reversed(made))))
