"""What optimizers keep and what their step needs, one row each.

Sources: `torch/optim/{adam,adamw,sgd,_adafactor}.py` of torch 2.13. Where no form of
the step is asked for, parameters on CUDA take the foreach one, those on CPUs a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Literal

from bigmodel.registry import Registry

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """Memory of an optimizer; states and copies are in the parameter's element type."""

    states: int
    """Tensors of a parameter's size that are kept for it."""
    factored: bool = False
    """Whether in their place a matrix has one state of its rows and one of its columns.
    Such an optimizer must see whole parameters, not shards."""
    form: Literal["default", "foreach", "loop", "fused"] = "default"
    """Which form of its step is asked for."""
    foreach_copies: int
    """Copies of all parameters that a foreach step holds at once."""
    loop_copies: int
    """Copies of one parameter that a for-loop step holds at once."""
    loop_keeps: int
    """Copies of a parameter that it still holds while it steps the next one."""
    passes: int
    """How often a step reads or writes every parameter-sized tensor."""

    def state_elements(self, shape: Shape) -> list[int]:
        """Return the elements of each state of a parameter of this shape."""
        if self.factored and len(shape) > 1:
            elements = prod(shape)
            return [elements // shape[-1], elements // shape[-2]]
        return [prod(shape)] * self.states

    def kept_elements(self, shapes: Iterable[Shape]) -> int:
        """Return the elements of all states of parameters of these shapes."""
        return sum(sum(self.state_elements(shape)) for shape in shapes)

    def copied_at_once(self, kind: str) -> int:
        """Return how many copies of all parameters a step on a kind of device holds."""
        return self.foreach_copies if self._form_on(kind) == "foreach" else 0

    def held_elements(self, sizes: Sequence[int], kind: str) -> int:
        """Return the most elements that a step holds for a moment.

        Args:
            sizes: Elements of the parameters, in the step's order.
            kind: Of device: `cuda` or `cpu`.
        """
        if self._form_on(kind) != "loop":
            return self.copied_at_once(kind) * sum(sizes)
        held = (
            self.loop_copies * size + self.loop_keeps * before
            for before, size in pairwise((0, *sizes))
        )
        return max(held, default=0)

    def _form_on(self, kind: str) -> str:
        if self.form != "default":
            return self.form
        return "foreach" if kind == "cuda" else "loop"


OPTIMIZERS: Registry[OptimizerRow] = Registry("optimizer")
# _multi_tensor_adamw holds exp_avg_sq_sqrt; _single_tensor_adam holds sqrt() and the
# quotient by the bias correction, which stays bound to its name in the next round.
_ADAM = OptimizerRow(states=2, foreach_copies=1, loop_copies=2, loop_keeps=1, passes=7)
OPTIMIZERS.add("adamw", _ADAM)
OPTIMIZERS.add("adam", _ADAM)
OPTIMIZERS.add("adamw-foreach", replace(_ADAM, form="foreach"))
OPTIMIZERS.add("adamw-loop", replace(_ADAM, form="loop"))
OPTIMIZERS.add("adamw-fused", replace(_ADAM, form="fused"))
OPTIMIZERS.add(
    "sgd",
    OptimizerRow(states=0, foreach_copies=0, loop_copies=0, loop_keeps=0, passes=3),
)
OPTIMIZERS.add(
    "sgd-momentum",
    OptimizerRow(states=1, foreach_copies=0, loop_copies=0, loop_keeps=0, passes=5),
)
# The update of a matrix is bound to its name while the next one's is made.
OPTIMIZERS.add(
    "adafactor",
    OptimizerRow(
        states=1,
        factored=True,
        foreach_copies=1,
        loop_copies=1,
        loop_keeps=1,
        passes=6,
    ),
)
