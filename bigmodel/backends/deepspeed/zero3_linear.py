"""Under ZeRO 3, linear layers keep no copies of their weights in autocast's precision.

Source: deepspeed 0.19, `runtime/zero/linear.py`: `zero.Init` replaces
`torch.nn.functional.linear`. The replacement saves the weight itself, so that it can be
let go, and hides it from autocast's cache behind a view; each product casts it anew.

A model does not say which weights are those of linear layers. Where all matrices may
be, they are taken to be; where one cannot be (a convolution, a matrix that its bias
shows to be stored the other way round, as in GPT-2), all copies are kept: never too
low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigmodel.backends.walk import Step
from bigmodel.simulator import Holdings, Program
from bigmodel.simulator.segments import HOLDER

_COPIES = HOLDER["cast"]
_CAST_BYTES = 2


def without_weight_copies(program: Program, steps: Sequence[Step]) -> Program:
    """Return a program whose copies of weights live for one product only."""
    if not all(_may_be_linear(step) for step in steps):
        return program
    matrices = (p for step in steps for p in step.owned if len(p.shape) == 2)
    largest = max((p.elements for p in matrices), default=0) * _CAST_BYTES
    tasks = tuple(
        replace(
            task,
            change=_at_most(task.change, 0),
            surge=_at_most(task.surge, largest),
        )
        for task in program.tasks
    )
    return replace(program, tasks=tasks)


def _may_be_linear(step: Step) -> bool:
    shapes = {param.name: param.shape for param in step.unit.params if not param.buffer}
    for name, shape in shapes.items():
        if len(shape) > 2:
            return False
        bias = shapes.get(f"{name.removesuffix('weight')}bias")
        if len(shape) == 2 and bias is not None and bias[0] != shape[0]:
            return False
    return True


def _at_most(holdings: Holdings, limit: int) -> Holdings:
    return tuple(
        (kind, max(0, min(count, limit)) if kind == _COPIES else count)
        for kind, count in holdings
    )
