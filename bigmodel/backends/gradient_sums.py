"""Where gradients add up over the micro-batches of a step, as shadows write it.

In fp32 and autocast: in place. With 16-bit weights: in the fp32 masters, see
`fp32_sums.py`. There the first gradient of a parameter is copied, and adding a later
one makes, on a CPU, an fp32 copy for a moment (torch 2.13 casts operands there before
it adds); CUDA's kernels cast as they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import final

from bigmodel.backends.walk import GRADIENTS, weight_bytes
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Task
from bigmodel.simulator.program import single


@final
class GradientSums:
    """Writes what becomes of the gradients that a backward has made.

    Args:
        plan: The plan.
        costs: Of the model on the cluster.
        builder: The program that is written.
        one_backward: Whether all micro-batches have a single backward.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        builder: ProgramBuilder,
        *,
        one_backward: bool = False,
    ) -> None:
        self._builder = builder
        self._width = weight_bytes(plan)
        self._casts = costs.cluster.device.kind == "cpu"
        self.in_fp32 = self._width == 2 and plan.accumulation > 1 and not one_backward
        """Whether they add up in fp32 masters during backward."""

    def add(self, sizes: Sequence[int], *, first: bool) -> None:
        """Write gradients that were made, one after another.

        Args:
            sizes: Elements of each.
            first: Whether these parameters had none before.
        """
        if self.in_fp32:
            for elements in sizes:
                self._move(elements, first=first)
        elif not first:
            gone = -sum(sizes) * self._width
            self._builder.allocate(GRADIENTS, gone, "accumulate gradient")

    def finish(self, sizes: Sequence[int], *, in_bucket: bool = False) -> None:
        """Write how gradients that did not add up in fp32 get there for the step.

        Args:
            sizes: Elements of each parameter.
            in_bucket: Whether the 16-bit gradients stay, as parts of a bucket.
        """
        if self._width == 4 or self.in_fp32 or not sizes:
            return
        if in_bucket:
            made = [4 * size for size in sizes]
            self._builder.allocate(GRADIENTS, sum(made), "gradients to fp32", made)
            return
        moved = [n for size in sizes for n in (4 * size, -self._width * size)]
        change, surge = sum(moved), max(accumulate(moved))
        self._builder.add(
            Task(
                label="gradients to fp32",
                change=((GRADIENTS, change),),
                surge=((GRADIENTS, surge),),
                tensors=single(GRADIENTS, moved),
            )
        )

    def _move(self, elements: int, *, first: bool) -> None:
        if first:
            self._builder.allocate(GRADIENTS, elements * 4, "gradient to fp32")
        elif self._casts:
            self._builder.add(
                Task(label="cast gradient", surge=((GRADIENTS, elements * 4),))
            )
        gone = -elements * self._width
        self._builder.allocate(GRADIENTS, gone, "drop half gradient")
