"""Engines that call the whole model on every rank: all but those with stages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigmodel.backends.engine import AbstractEngine, Batch, Job, LossShare
from bigmodel.backends.evaluation import evaluating
from bigmodel.backends.forward import compute_loss, model_inputs, weigh
from bigmodel.backends.precision import autocast


class AbstractWholeModelEngine(AbstractEngine):
    """Turns three small abilities into forward and backward of a step.

    They are also what a loop of the user's own runs on.
    """

    def __init__(self, job: Job) -> None:
        self._plan = job.plan
        self._loss = job.loss
        self._device = job.device

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The user's model, whose forward says which inputs it takes."""

    @abstractmethod
    def begin(self, *, last: bool) -> None:
        """Say, before a forward, whether its backward ends the accumulation."""

    @abstractmethod
    def call(self, *positional: Any, **named: Any) -> Any:
        """Return the model's output, from inputs as the user has them."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, which is already its share of the step's."""

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Return the model's output in the plan's precision."""
        with autocast(self._plan, self._device):
            return self.call(*positional, **named)

    def forward_backward(
        self, micro_batches: Sequence[Batch], shares: Sequence[LossShare]
    ) -> Tensor:
        """Run the micro-batches one after another; the last one ends the window."""
        total = torch.zeros((), device=self._device)
        last = len(micro_batches) - 1
        pairs = zip(micro_batches, shares, strict=True)
        for index, (batch, share) in enumerate(pairs):
            self.begin(last=index == last)
            loss = weigh(self._forward(batch, training=True), share)
            self.backward(loss)
            total += loss.detach()
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss of this rank's batch."""
        with evaluating(self.module):
            loss = self._forward(batch, training=False).detach()
        self.end_evaluation()
        return loss

    def infer(self, *positional: Any, **named: Any) -> Any:
        """Return the output in the plan's precision, within `evaluating`."""
        with autocast(self._plan, self._device):
            return self.evaluation_call(*positional, **named)

    def end_evaluation(self) -> None:
        """Let go of what forwards without a backward have gathered."""

    def evaluation_call(self, *positional: Any, **named: Any) -> Any:
        """Return the output in evaluation; engines may leave their wrapper out."""
        return self.call(*positional, **named)

    def _forward(self, batch: Batch, *, training: bool) -> Tensor:
        call = self.call if training else self.evaluation_call
        with autocast(self._plan, self._device):
            positional, named = model_inputs(self.module, batch, self._loss)
            output = call(*positional, **named)
            loss = compute_loss(self.module, output, batch, self._loss)
            # A model over several devices may have it on another one.
            return loss.to(self._device)
