"""Windows from any iterable, with all ranks stopping at the same step.

Every rank reads a stream of its own, and streams may end at different places. Where all
know their lengths, the ranks agree on a number of steps before the first one; else they
tell each other before every step how much they still have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.backends.batch import to_device
from bigmodel.backends.engine import Batch
from bigmodel.errors import UsageError
from bigmodel.plans import Plan
from bigmodel.running.agreement import gather_numbers
from bigmodel.running.samples import Last
from bigmodel.running.window import Window

_UNKNOWN = -1


@final
class StreamFeed(Iterator[Window]):
    """Windows of as many items as the plan accumulates.

    Args:
        stream: Yields the micro-batches of this rank, each with any number of samples.
            Ranks of one pipeline must yield the same ones.
        plan: Says how many make a step.
        device: Where this rank computes.
        epochs: How often to go through the stream; None: without end, for streams that
            can be begun again.
        last: Whether items that fill no window on every rank are left out, or are a
            step in which missing ones weigh nothing.
        skip: Items to leave out at the beginning.
    """

    def __init__(
        self,
        stream: Iterable[Batch],
        plan: Plan,
        device: torch.device,
        *,
        epochs: int | None = 1,
        last: Last = "drop",
        skip: int = 0,
    ) -> None:
        self.stream = stream
        self.taken = 0
        """Items that have been read, those of an incomplete end included."""
        self._plan = plan
        self._device = device
        self._epochs = epochs
        self._last: Last = last
        self._skip = skip
        self._windows = self._run()

    def __next__(self) -> Window:
        return next(self._windows)

    def _run(self) -> Iterator[Window]:
        epoch = 0
        while self._epochs is None or epoch < self._epochs:
            any_windows = False
            for window in self._epoch():
                any_windows = True
                yield window
            # All ranks see the same: an iterator cannot be begun again.
            if not any_windows:
                return
            epoch += 1

    def _epoch(self) -> Iterator[Window]:
        steps = self._agree_on_steps()
        items = iter(self.stream)
        spare: Batch | None = None
        done = 0
        while steps is None or done < steps:
            held = self._take(items)
            if held:
                spare = held[-1]
            if steps is None and not self._goes_on(len(held)):
                return
            yield self._window(held, spare)
            done += 1

    def _take(self, items: Iterator[Batch]) -> list[Batch]:
        held: list[Batch] = []
        while len(held) < self._plan.accumulation:
            try:
                item = next(items)
            except StopIteration:
                break
            self.taken += 1
            if self.taken > self._skip:
                held.append(to_device(item, self._device))
        return held

    def _agree_on_steps(self) -> int | None:
        left = known_length(self.stream)
        if left != _UNKNOWN:
            left = max(0, left - max(0, self._skip - self.taken))
        return _agree(left, self._plan, self._device, self._last)

    def _goes_on(self, held: int) -> bool:
        counts = gather_numbers(held, self._plan.world, self._device)
        if self._last == "drop":
            return min(counts) == self._plan.accumulation
        return max(counts) > 0

    def _window(self, held: list[Batch], spare: Batch | None) -> Window:
        missing = self._plan.accumulation - len(held)
        if missing and spare is None:
            raise UsageError(
                "the stream of this rank ended before its first batch, while others "
                "have some; give every rank a part of the data, or use last='drop'"
            )
        return Window(
            micro_batches=(*held, *[spare] * missing),
            real=(True,) * len(held) + (False,) * missing,
        )


def agreed_steps(
    stream: Any, plan: Plan, device: torch.device, last: Last = "drop"
) -> int:
    """Return how many steps one epoch of a stream takes; collective.

    Raises:
        UsageError: The stream of a rank does not say its length.
    """
    steps = _agree(known_length(stream), plan, device, last)
    if steps is None:
        raise UsageError(
            "the stream of a rank does not say how many items it has: give one with "
            "a length, or count steps as they come"
        )
    return steps


def is_stream(source: Any) -> bool:
    """Say whether a source is read in its own order: a loader or another iterable."""
    if isinstance(source, (DataLoader, IterableDataset, Iterator)):
        return True
    return not (isinstance(source, Sized) and hasattr(source, "__getitem__"))


def known_length(stream: Any) -> int:
    """Return how many items a stream has, or -1 where it does not reliably say."""
    if isinstance(stream, DataLoader) and isinstance(stream.dataset, IterableDataset):
        return _UNKNOWN
    try:
        return len(stream)
    except TypeError:
        return _UNKNOWN


def _agree(left: int, plan: Plan, device: torch.device, last: Last) -> int | None:
    """Return the steps that all ranks make; None where one does not know."""
    counts = gather_numbers(left, plan.world, device)
    if _UNKNOWN in counts:
        return None
    if min(counts) == 0 < max(counts):
        raise UsageError(_empty(counts))
    if last == "drop":
        return min(counts) // plan.accumulation
    return -(-max(counts) // plan.accumulation)


def _empty(counts: list[int]) -> str:
    empty = [str(rank) for rank, count in enumerate(counts) if not count]
    return (
        f"the data of rank {', '.join(empty)} is empty, while others have "
        f"{max(counts)} batches; give every rank a part of the data"
    )
