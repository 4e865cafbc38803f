"""The module that torch's pipeline schedules run on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from bigmodel.backends.engine import Batch, Job, LossShare
from bigmodel.backends.forward import compute_loss, weigh
from bigmodel.backends.loss_scale import LossScale
from bigmodel.backends.pipeline.cut import AbstractCut
from bigmodel.backends.precision import autocast


class Stage(nn.Module):
    """Hidden states in, hidden states out; on the last stage the loss.

    Only hidden states go through torch's schedule. All else that a stage needs of the
    batch it takes from its own copy: `feed` it the micro-batches, and every forward
    takes the next one. This is right because single-stage schedules run their forwards
    in the order of the micro-batches, and because recomputation calls blocks, never
    the stage.
    """

    def __init__(self, job: Job, cut: AbstractCut) -> None:
        super().__init__()
        self.model = cut.model
        self.cut = cut
        self._loss = job.loss
        self._plan = job.plan
        self._device = job.device
        self._queue: Iterator[Batch] = iter(())
        self._shares: Iterator[LossShare] = iter(())
        self._scale = LossScale(enabled=False)

    def feed(
        self,
        micro_batches: Iterable[Batch],
        shares: Iterable[LossShare] = (),
        scale: LossScale | None = None,
    ) -> None:
        """Set the micro-batches of the coming forwards, and what losses weigh."""
        self._queue = iter(micro_batches)
        self._shares = iter(shares)
        self._scale = scale or LossScale(enabled=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the stage on the next micro-batch.

        Args:
            hidden: What the stage before returned; a placeholder on the first stage.

        Returns:
            Hidden states, or the loss: in training its share of the step's, scaled; in
            evaluation the loss itself.
        """
        batch = next(self._queue)
        with autocast(self._plan, self._device):
            if self.cut.watches:
                with torch.enable_grad():
                    output = self._run(hidden, batch)
                self.cut.verify(output)
                output = output.detach()
            else:
                output = self._run(hidden, batch)
        if not self.cut.is_last:
            # FSDP2 warns of views (GPT-2 returns one), and only contiguous tensors can
            # be sent. Hidden states are small beside what a stage keeps.
            return output.clone() if output._is_view() else output.contiguous()
        if not self.training:
            return output
        return self._scale.scale(weigh(output, next(self._shares)))

    def _run(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return hidden states, or the loss."""
        output = self.cut.run(None if self.cut.is_first else hidden, batch)
        if not self.cut.is_last:
            return output
        return compute_loss(self.model, output, batch, self._loss)
