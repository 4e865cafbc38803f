"""Batches for every rank, in an order that does not depend on the plan.

samples in the epoch's order   0 1 2 3 | 4 5 6 7 | 8 9      global batch 4
two data-parallel ranks        rank 0: 0 1, 4 5, 8 9        8 9 are left out, or are a
                               rank 1: 2 3, 6 7, -          window of their own

Where a run is, is said by the number of samples that all ranks together have read of an
epoch. So another plan, with other ranks or micro-batches, goes on at the same sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final, get_args

import torch
from torch.utils.data import DataLoader, Sampler

from bigmodel.backends.batch import to_device
from bigmodel.errors import UsageError, Violation
from bigmodel.plans import Plan
from bigmodel.running.window import Window, cut

Last = Literal["drop", "short"]
"""What becomes of the samples at the end of an epoch that fill no global batch: left
out, or a step of their own, whose loss is the mean over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """Where in its data a run is, whatever the plan."""

    length: int
    """Samples in the dataset."""
    shuffle: bool
    seed: int
    """Of the order; it and the epoch alone decide."""
    epoch: int = 0
    samples: int = 0
    """Samples of this epoch that all ranks together have read."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a checkpoint's file holds it."""
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> DataPosition:
        """Return what `to_json` was asked of."""
        return DataPosition(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank reads in one step."""

    indices: list[int]
    sizes: tuple[int, ...]
    """Samples of every micro-batch."""
    real: tuple[bool, ...]
    full: bool
    """Whether this is a whole global batch."""
    after: DataPosition


@final
class RankBatches(Sampler[list[int]]):
    """Indices of the local batches of one rank, epoch after epoch.

    Args:
        plan: Says how large batches are and who reads what.
        rank: The rank; those of one pipeline read the same samples.
        start: Where to begin.
        epochs: How many from the first one on; None: without end.
        last: What becomes of the end of an epoch.
        evaluates: Whether no backward follows, so that stages take any shape.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        start: DataPosition,
        epochs: int | None = None,
        last: Last = "drop",
        evaluates: bool = False,
    ) -> None:
        _check(start.length, plan, last)
        if last == "short" and not evaluates:
            _check_shapes(start.length, plan)
        self._plan = plan
        self._data_rank = plan.mesh.data_rank(rank)
        self._start = start
        self._epochs = epochs
        self._last = last

    def __iter__(self) -> Iterator[list[int]]:
        for share in self.shares():
            yield share.indices

    def shares(self) -> Iterator[_Share]:
        """Yield what this rank reads, step by step."""
        position, size = self._start, self._plan.global_batch
        while self._epochs is None or position.epoch < self._epochs:
            order = _order(position)
            while (left := position.length - position.samples) > 0:
                if left < size and self._last == "drop":
                    break
                after = replace(position, samples=position.samples + min(size, left))
                yield self._share(order, position.samples, min(size, left), after)
                position = after
            position = replace(position, epoch=position.epoch + 1, samples=0)

    def _share(
        self, order: list[int], begin: int, count: int, after: DataPosition
    ) -> _Share:
        plan = self._plan
        indices: list[int] = []
        sizes: list[int] = []
        real: list[bool] = []
        for index in range(plan.accumulation):
            offset = self._data_rank * plan.local_batch + index * plan.micro_batch
            mine = order[begin + offset : begin + min(count, offset + plan.micro_batch)]
            real.append(bool(mine))
            if not mine:
                # Weighs nothing, so any samples will do.
                mine = [order[i % len(order)] for i in range(plan.micro_batch)]
            sizes.append(len(mine))
            indices += mine
        return _Share(
            indices=indices,
            sizes=tuple(sizes),
            real=tuple(real),
            full=count == plan.global_batch,
            after=after,
        )


def steps_of_epoch(length: int, plan: Plan, last: Last = "drop") -> int:
    """Return how many optimizer steps one epoch of a dataset takes."""
    _check(length, plan, last)
    if last == "short":
        _check_shapes(length, plan)
    whole, rest = divmod(length, plan.global_batch)
    return whole + (rest > 0 and last == "short")


@final
class DatasetFeed(Iterator[Any]):
    """Local batches of a dataset that is read by index, on the device.

    Args:
        dataset: Has samples by index.
        sampler: Says which ones.
        device: Where this rank computes.
        workers: Processes that read ahead.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: RankBatches,
        start: DataPosition,
        device: torch.device,
        workers: int = 0,
    ) -> None:
        self.position = start
        """After the batch that was taken last."""
        self._device = device
        self._shares = sampler.shares()
        self._batches = iter(
            DataLoader(
                dataset,
                batch_sampler=sampler,
                num_workers=workers,
                pin_memory=device.type == "cuda",
                # Its own generator: the loader draws a seed, which would move torch's
                # global random numbers, and with them dropout.
                generator=torch.Generator(),
            )
        )

    def __next__(self) -> Any:
        batch = to_device(next(self._batches), self._device)
        share = next(self._shares)
        self.position = share.after
        if share.full:
            return batch
        return Window(micro_batches=tuple(cut(batch, share.sizes)), real=share.real)


def _order(position: DataPosition) -> list[int]:
    if not position.shuffle:
        return list(range(position.length))
    generator = torch.Generator().manual_seed(position.seed + position.epoch)
    return torch.randperm(position.length, generator=generator).tolist()


def _check(length: int, plan: Plan, last: Last) -> None:
    if last not in get_args(Last):
        raise UsageError(
            Violation(
                field="last",
                got=last,
                rule=f"it must be one of {', '.join(get_args(Last))}",
            )
        )
    if length < plan.global_batch and (last == "drop" or length < 1):
        raise UsageError(
            Violation(
                field="samples in the dataset",
                got=length,
                rule=f"one step of the plan needs {plan.global_batch} (micro-batch "
                f"{plan.micro_batch} x accumulation {plan.accumulation} x "
                f"{plan.mesh.data_parallel} data-parallel ranks)",
                cure="use more data, or plan for a smaller global batch",
            )
        )


def _check_shapes(length: int, plan: Plan) -> None:
    if plan.stages and length % plan.micro_batch:
        raise UsageError(
            Violation(
                field="samples in the dataset",
                got=length,
                rule="micro-batches of a pipeline have one shape, and the last short "
                f"one would not have {plan.micro_batch} samples",
                cure="use last='drop', or leave samples out until the micro-batch "
                f"divides them: {length - length % plan.micro_batch}",
            )
        )
