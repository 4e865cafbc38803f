"""What the loss of a micro-batch weighs in that of the global batch.

A mean over tokens is not the mean of the means of micro-batches with unequal numbers of
tokens. With counts c of micro-batch i on rank r, its mean loss weighs c / sum of all c;
engines average over data-parallel ranks, so the share is that times their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.backends.batch import num_samples
from bigmodel.backends.engine import Batch, LossFunction, LossShare
from bigmodel.plans import Plan

CountTargets = Callable[[Batch], "int | Tensor"]
"""From a micro-batch to the number of values that its mean loss is a mean over."""

IGNORED = -100
"""Label that torch's cross-entropy leaves out by default."""


@final
class LossShares:
    """Shares of micro-batches and means of losses, the same on every rank.

    Args:
        plan: The plan.
        device: Where this rank computes.
        count: Counts the targets of a micro-batch; None: all micro-batches are full and
            weigh the same, so that no rank needs to ask the others.
    """

    def __init__(
        self, plan: Plan, device: torch.device, count: CountTargets | None
    ) -> None:
        self._plan = plan
        self._device = device
        self._count = count

    @property
    def counts(self) -> bool:
        """Whether micro-batches may weigh differently."""
        return self._count is not None

    def of(self, micro_batches: Sequence[Batch]) -> list[LossShare]:
        """Return the share of every micro-batch of this rank; collective if counted."""
        if self._count is None:
            return [1 / len(micro_batches)] * len(micro_batches)
        counts = self._counts(micro_batches)
        total = counts.sum()
        if self._plan.world > 1:
            dist.all_reduce(total)
        # Ranks of one pipeline count the same batches.
        total /= self._plan.mesh.pipeline
        shares = counts * self._plan.mesh.data_parallel / total.clamp(min=1)
        return list(shares.unbind())

    def mean(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return the mean over all ranks of the mean loss of one batch each."""
        if self._count is None:
            return self.average(loss)
        count = self._counts([batch])[0]
        both = torch.stack([loss.detach().float() * count, count])
        if self._plan.world > 1:
            dist.all_reduce(both)
        return both[0] / both[1].clamp(min=1)

    def average(self, value: Tensor) -> Tensor:
        """Return the mean over all ranks; those of one pipeline report the same."""
        if self._plan.world == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self._plan.world

    def _counts(self, batches: Sequence[Batch]) -> Tensor:
        count = self._count or num_samples
        return torch.stack(
            [
                torch.as_tensor(count(batch), device=self._device).float()
                for batch in batches
            ]
        )


def target_counter(
    model: nn.Module, loss: LossFunction | None, given: CountTargets | None
) -> CountTargets | None:
    """Return how to count, where the user has not said so.

    A model of transformers that computes its own loss takes the mean over labels other
    than -100; causal ones leave out the first label of every sequence.
    """
    if given is not None:
        return given
    if loss is not None or getattr(model, "config", None) is None:
        return None
    shifted = type(model).__name__.endswith(("CausalLM", "LMHeadModel"))

    def count(batch: Any) -> int | Tensor:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return num_samples(batch)
        if shifted and labels.dim() > 1:
            labels = labels[:, 1:]
        return (labels != IGNORED).sum()

    return count
