"""What optimizers keep and what their step needs, one row each.

Sources: `torch/optim/adam.py`, `adamw.py`, `sgd.py` of torch 2.13. The foreach form is
torch's default for CUDA parameters, the for-loop form for CPU parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """Memory of an optimizer."""

    states: int
    """Tensors kept for every parameter, in the parameter's element type."""
    foreach_copies: int
    """Copies of all parameters that a foreach step holds at once."""
    loop_copies: int
    """Copies of one parameter that a for-loop step holds at once."""
    loop_keeps: int
    """Copies of a parameter that it still holds while it steps the next one."""
    passes: int
    """How often a step reads or writes every parameter-sized tensor."""


OPTIMIZERS: Registry[OptimizerRow] = Registry("optimizer")
# _multi_tensor_adamw holds exp_avg_sq_sqrt; _single_tensor_adam holds sqrt() and the
# quotient by the bias correction, which stays bound to its name in the next round.
_ADAM = OptimizerRow(states=2, foreach_copies=1, loop_copies=2, loop_keeps=1, passes=7)
OPTIMIZERS.add("adamw", _ADAM)
OPTIMIZERS.add("adam", _ADAM)
OPTIMIZERS.add(
    "sgd",
    OptimizerRow(states=0, foreach_copies=0, loop_copies=0, loop_keeps=0, passes=3),
)
OPTIMIZERS.add(
    "sgd-momentum",
    OptimizerRow(states=1, foreach_copies=0, loop_copies=0, loop_keeps=0, passes=5),
)
