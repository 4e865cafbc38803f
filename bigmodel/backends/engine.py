"""What a backend does on one rank when it really trains.

The loop around it (data, micro-batches, logging, checkpoints) is in `bigmodel.running`
and the same for all; a backend only decides how weights, gradients and activations are
held and moved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigmodel.plans import Plan

Batch = Any
"""A tensor, or a tuple, list or dict of tensors whose dim 0 is the samples."""

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
"""From parameters (or parameter groups) to an optimizer over them."""

LossFunction = Callable[[Any, Batch], Tensor]
"""From the model's output and the micro-batch to the mean loss, a scalar."""


LossShare = float | Tensor
"""What the mean loss of a micro-batch is multiplied with before its backward. Shares
are such that the mean over data-parallel ranks of the sum over micro-batches is the
loss of the global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer step did, the same on every rank."""

    grad_norm: Tensor | None
    """Global norm of the gradients before clipping; None where clipping is off or the
    step was skipped."""
    skipped: bool = False
    """Whether a gradient overflowed in float16, so that nothing was stepped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that an engine is built from, the same on every rank but for the device."""

    plan: Plan
    model: nn.Module
    """The whole model with its initial weights, in fp32 and on the CPU; on ranks
    above 0 perhaps on `meta`, for backends that fill from the first rank."""
    optimizer: OptimizerFactory
    loss: LossFunction | None
    """None: the model's own output holds the loss."""
    clip_norm: float | None
    """Largest global norm of the gradients; None: no clipping."""
    device: torch.device
    """Where this rank computes."""


class AbstractEngine(ABC):
    """One rank of a job. Every method is collective: all ranks call it together."""

    @abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[Batch], shares: Sequence[LossShare]
    ) -> Tensor:
        """Run forward and backward of all micro-batches of one optimizer step.

        Gradients end up as the mean over data-parallel ranks of the gradient of the
        sum over micro-batches of share x mean loss.

        Args:
            micro_batches: The micro-batches of this data-parallel rank, on the device.
                Ranks of one pipeline are given the same ones.
            shares: One for each micro-batch; 1 / their number where all weigh the same.

        Returns:
            The sum over micro-batches of share x mean loss, detached; valid on every
            rank of a pipeline.
        """

    @abstractmethod
    def update(self) -> Update:
        """Clip, step the optimizer, and drop the gradients."""

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer of this rank, whose groups a scheduler changes.

        None on a rank that trains nothing.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch of this data-parallel rank, without training.

        The model is in evaluation mode meanwhile and gradients are off.
        """

    @abstractmethod
    def model_state(self) -> dict[str, Tensor]:
        """Return the whole model's weights by the names they have in one process.

        On rank 0 full tensors on the CPU; on the other ranks an empty dict.
        """

    @abstractmethod
    def save(self, folder: str) -> None:
        """Write weights and optimizer states of all ranks into a folder that exists."""

    @abstractmethod
    def load(self, folder: str) -> None:
        """Read what the `save` of an engine that shares checkpoints wrote."""
