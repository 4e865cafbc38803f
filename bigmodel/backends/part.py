"""What a rank holds of a model, as a shadow writes it: whole, sharded, or a stage."""

from __future__ import annotations

from abc import ABC, abstractmethod

from bigmodel.simulator import Program, ProgramBuilder


class AbstractPart(ABC):
    """Writes the phases of a step into a program, as the engine runs them."""

    @abstractmethod
    def forward(self, index: int) -> None:
        """Write the forward of the micro-batch with this index."""

    @abstractmethod
    def backward(self, index: int, *, last: bool) -> None:
        """Write the backward of a micro-batch; the last one ends the accumulation."""

    @abstractmethod
    def update(self) -> None:
        """Write the optimizer's step and the end of the gradients."""


def write_step(
    part: AbstractPart, builder: ProgramBuilder, micro_batches: int
) -> Program:
    """Write a step without pipeline stages: micro-batch after micro-batch."""
    for index in range(micro_batches):
        part.forward(index)
        part.backward(index, last=index == micro_batches - 1)
    part.update()
    return builder.build()
