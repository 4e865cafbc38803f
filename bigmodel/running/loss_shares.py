"""What the loss of a micro-batch weighs in that of the global batch.

A mean over tokens is not the mean of the means of micro-batches with unequal numbers of
tokens. With counts c of micro-batch i on rank r, its mean loss weighs c / sum of all c;
engines average over data-parallel ranks, so the share is that times their number.

A micro-batch without any target has no mean (0 / 0). It weighs nothing, and another one
is run in its place, because a loss that is not a number has gradients that are none
either. To know, counts that are on a device are waited for, once a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.backends.batch import num_samples, to_device
from bigmodel.backends.engine import Batch, LossFunction, LossShare
from bigmodel.plans import Plan
from bigmodel.running.window import Window, on_cpu

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
        count: Counts the targets of a micro-batch; None: samples are counted, where
            micro-batches differ in them.
    """

    def __init__(
        self, plan: Plan, device: torch.device, count: CountTargets | None
    ) -> None:
        self._plan = plan
        self._device = device
        self._count = count
        self._spare: Batch | None = None
        # A micro-batch with targets, on the CPU.
        self._looked = False

    def of(
        self, micro_batches: Sequence[Batch], real: Sequence[bool] = ()
    ) -> tuple[list[Batch], list[LossShare]]:
        """Return what to run and what each weighs; collective if counted.

        Args:
            micro_batches: Those of this rank, on the device.
            real: Whether each counts; empty: all do, and they have equal sizes on all
                ranks.
        """
        run = list(micro_batches)
        if self._count is None and not real:
            self._warn_of_ignored(run)
            return run, [1 / len(run)] * len(run)
        counts = self._counts(run).cpu()
        filled = [bool(count) for count in counts.tolist()]
        if real:
            counts = counts * torch.tensor(real, dtype=counts.dtype)
        if self._spare is None and any(filled):
            self._spare = on_cpu(run[filled.index(True)])
        if self._spare is not None:
            for index, good in enumerate(filled):
                if not good:
                    run[index] = to_device(self._spare, self._device)
        counts = counts.to(self._device)
        total = counts.sum()
        if self._plan.world > 1:
            dist.all_reduce(total)
        # Ranks of one pipeline count the same batches.
        total /= self._plan.mesh.pipeline
        shares = counts * self._plan.mesh.data_parallel / total.clamp(min=1)
        if self._spare is None:
            return run, [0.0] * len(run)
        return run, list(shares.unbind())

    def samples(self, window: Window) -> int:
        """Return the samples of all ranks' windows; those of one pipeline are alike."""
        own = sum(num_samples(batch) for batch in window.batches)
        total = torch.tensor(own, dtype=torch.float32, device=self._device)
        if self._plan.world > 1:
            dist.all_reduce(total)
        return int(total) // self._plan.mesh.pipeline

    def count(self, batch: Batch) -> Tensor:
        """Return the number of values that a batch's mean loss is a mean over."""
        return self._counts([batch])[0].to(self._device)

    def mean(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return the mean over all ranks of the mean loss of one batch each."""
        if self._count is None:
            return self.average(loss)
        return self.total_mean(loss.detach().float(), self.count(batch))

    def total_mean(self, mean: Tensor, count: Tensor) -> Tensor:
        """Return the mean over all ranks of means over this many values each."""
        total = torch.where(count > 0, mean * count, 0.0)
        both = torch.stack([total, count])
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
        """Return the counts, where they were made."""
        count = self._count or num_samples
        return torch.stack([torch.as_tensor(count(batch)).float() for batch in batches])

    def _warn_of_ignored(self, batches: Sequence[Batch]) -> None:
        """Say once that labels are left out, but nobody has said how to count them."""
        if self._looked:
            return
        self._looked = True
        parts = len(batches) * self._plan.mesh.data_parallel
        if parts > 1 and any(_ignores(batch) for batch in batches):
            warnings.warn(
                "some labels are -100, which losses usually leave out, and every "
                "micro-batch weighs the same, however many labels it has; so the loss "
                "is a mean of means, not the mean over labels: give prepare(..., "
                "targets=lambda batch: (batch['labels'] != -100).sum())",
                stacklevel=4,
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
        labels = _labels(batch)
        if labels is None:
            return num_samples(batch)
        if shifted and labels.dim() > 1:
            labels = labels[:, 1:]
        return (labels != IGNORED).sum()

    return count


def _labels(batch: Any) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    return labels


def _ignores(batch: Any) -> bool:
    labels = _labels(batch)
    return labels is not None and bool((labels == IGNORED).any())
