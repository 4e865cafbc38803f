"""What ZeRO 3 changes in linear layers: autocast's copies, and the order of gradients.

Source: deepspeed 0.19, `runtime/zero/linear.py`: `zero.Init` replaces
`torch.nn.functional.linear`. The replacement saves the weight itself, so that it can be
let go, and hides it from autocast's cache behind a view; each product casts it anew.
Its backward hands on the gradient of the weight before that of the bias, torch's own
after it.

A model does not say which weights are those of linear layers. Where all matrices may
be, they are taken to be; where one cannot be (a convolution, a matrix that its bias
shows to be stored the other way round, as in GPT-2), all copies are kept: never too
low.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import final

from bigmodel.backends.walk import Step, gradient_name
from bigmodel.models import Gradient
from bigmodel.simulator import Holdings, Program, Task
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
            tensors=_for_a_moment(task, largest),
        )
        for task in program.tasks
    )
    return replace(program, tasks=tasks)


@final
class LinearOrder:
    """Puts gradients that are complete into the order of the replacement.

    A bias waits for its weight. Nothing is computed between the two.

    Args:
        steps: The units whose gradients they are.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._weight_of = dict(pair for step in steps for pair in _pairs(step))
        self._waiting: dict[str, int] = {}
        self._seen: set[str] = set()

    def begin(self) -> None:
        """Begin a backward."""
        self._waiting.clear()
        self._seen.clear()

    def turn(self, step: Step, gradients: Iterable[Gradient]) -> Iterator[int]:
        """Yield the elements of the gradients whose turn has come.

        Args:
            step: The unit that they belong to.
            gradients: In torch's order.
        """
        for gradient in gradients:
            name = gradient_name(step.placed, gradient)
            weight = self._weight_of.get(name)
            if weight is not None and weight not in self._seen:
                self._waiting[weight] = gradient.elements
                continue
            self._seen.add(name)
            yield gradient.elements
            if name in self._waiting:
                yield self._waiting.pop(name)


def _pairs(step: Step) -> Iterator[tuple[str, str]]:
    """Yield the biases of what may be linear layers, each with its weight."""
    trained = {param.name: param for param in step.owned if param.trainable}
    for name, bias in trained.items():
        weight = trained.get(name.removesuffix("bias") + "weight")
        if weight is not None and weight.shape[:-1] == (bias.elements,):
            yield step.full_name(bias), step.full_name(weight)


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


def _for_a_moment(task: Task, limit: int) -> Holdings:
    """Return the tensors of a task with one copy in place of all it makes."""
    rest = tuple((kind, count) for kind, count in task.tensors if kind != _COPIES)
    copy = min(dict(task.surge).get(_COPIES, 0), limit)
    if not task.tensors or copy <= 0:
        return rest
    return ((_COPIES, copy), *rest, (_COPIES, -copy))
