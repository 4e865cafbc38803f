"""Batches for every rank, in an order that does not depend on the plan.

samples in the epoch's order   0 1 2 3 | 4 5 6 7 | 8 9      global batch 4
two data-parallel ranks        rank 0: 0 1, 4 5             8 9 are left out
                               rank 1: 2 3, 6 7
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Sampler

from bigmodel.backends.batch import to_device
from bigmodel.errors import UsageError, Violation
from bigmodel.plans import Plan


@final
class RankBatches(Sampler[list[int]]):
    """Indices of the local batches of one rank, epoch after epoch.

    Args:
        num_samples: Samples in the dataset.
        plan: Says how large batches are and who reads what.
        rank: The rank; those of one pipeline read the same samples.
        shuffle: Whether every epoch has another order.
        seed: Of the order; it and the epoch alone decide.
        epochs: How many; None: without end.
        start: Global batches to leave out at the beginning.
    """

    def __init__(
        self,
        num_samples: int,
        plan: Plan,
        rank: int,
        *,
        shuffle: bool,
        seed: int,
        epochs: int | None,
        start: int,
    ) -> None:
        if num_samples < plan.global_batch:
            raise UsageError(
                Violation(
                    field="samples in the dataset",
                    got=num_samples,
                    rule=f"one step of the plan needs {plan.global_batch} (micro-batch "
                    f"{plan.micro_batch} x accumulation {plan.accumulation} x "
                    f"{plan.mesh.data_parallel} data-parallel ranks)",
                    cure="use more data, or plan for a smaller global batch",
                )
            )
        self._num_samples = num_samples
        self._plan = plan
        self._data_rank = plan.mesh.data_rank(rank)
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = epochs
        self._start = start

    def __iter__(self) -> Iterator[list[int]]:
        size, local = self._plan.global_batch, self._plan.local_batch
        per_epoch = self._num_samples // size
        epoch, first = divmod(self._start, per_epoch)
        while self._epochs is None or epoch < self._epochs:
            order = self._order(epoch)
            for index in range(first, per_epoch):
                begin = index * size + self._data_rank * local
                yield order[begin : begin + local]
            epoch, first = epoch + 1, 0

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        generator = torch.Generator().manual_seed(self._seed + epoch)
        return torch.randperm(self._num_samples, generator=generator).tolist()


def batches(
    dataset: Any, sampler: RankBatches, device: torch.device, workers: int = 0
) -> Iterator[Any]:
    """Yield the local batches, collated and on the device."""
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Its own generator: the loader draws a seed, which would move torch's global
        # random numbers, and with them dropout.
        generator=torch.Generator(),
    )
    for batch in loader:
        yield to_device(batch, device)
