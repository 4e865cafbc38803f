"""What a hand-written loop is, and the step that most of them share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.overhead.subjects import (
    ACCUMULATION,
    CLIP_NORM,
    MICRO_BATCH,
    loss_of,
    make_optimizer,
)

Batch = tuple[Tensor, Tensor]
"""Features and classes."""


class Loop:
    """A step, with the name that `Engine` has for it."""

    def __init__(self, step: Callable[[Any], Tensor]) -> None:
        self.step = step

    def close(self) -> None:
        """Drop all that the step holds."""
        del self.step
        gc.collect()


def micro_batches(batch: Batch) -> zip:
    return zip(*(part.split(MICRO_BATCH) for part in batch), strict=True)


def accumulating_loop(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    begin: Callable[[bool], Any] = lambda last: None,
) -> Loop:
    """Return the loop of a model whose gradients autograd leaves with its parameters.

    Args:
        model: What is trained.
        forward: From features to the model's output, where the batch is.
        begin: Told before a micro-batch whether it is the last one of the step.
    """
    optimizer = make_optimizer(model.parameters())

    def step(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for index, micro in enumerate(micro_batches(batch)):
            begin(index == ACCUMULATION - 1)
            loss = loss_of(forward(micro[0]), micro) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Loop(step)
