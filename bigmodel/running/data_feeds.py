"""Where a training run's batches come from, and where it is in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from bigmodel.backends.engine import Batch
from bigmodel.errors import UsageError
from bigmodel.plans import Plan
from bigmodel.running.checkpoint_folder import CheckpointFolder
from bigmodel.running.samples import (
    DataPosition,
    DatasetFeed,
    Last,
    RankBatches,
    steps_of_epoch,
)
from bigmodel.running.streams import StreamFeed, agreed_steps, is_stream
from bigmodel.running.window import Window

Start = int | DataPosition | str | Path | None
"""Where data begins: steps to leave out, a place, the folder of a checkpoint written
under any plan, or None, where a loaded checkpoint was."""


@final
class DataFeeds:
    """Makes feeds, and remembers the one that trains.

    Args:
        plan: The plan.
        rank: This one.
        device: Where it computes.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        self._plan = plan
        self._rank = rank
        self._device = device
        self._feed: DatasetFeed | StreamFeed | None = None
        self._position: DataPosition | None = None
        # Of a loaded checkpoint, until a feed takes it up.
        self._stream: dict[str, Any] | None = None
        # The same for a stream.

    @property
    def position(self) -> DataPosition | None:
        """Where the run is in a dataset; None where it reads none by index."""
        if isinstance(self._feed, DatasetFeed):
            return self._feed.position
        return self._position

    def training(
        self,
        source: Any,
        *,
        shuffle: bool,
        seed: int,
        epochs: int | None,
        start: Start,
        workers: int,
        last: Last,
    ) -> Iterator[Batch | Window]:
        """Return the feed that trains; see `Engine.batches`."""
        if isinstance(start, (str, Path)):
            start = _position_in(start)
        if is_stream(source):
            self._feed = self._from_stream(source, epochs, start, last)
        else:
            fresh = DataPosition(length=len(source), shuffle=shuffle, seed=seed)
            begin = self._begin(fresh, start)
            sampler = RankBatches(
                self._plan, self._rank, start=begin, epochs=epochs, last=last
            )
            self._feed = DatasetFeed(source, sampler, begin, self._device, workers)
        self._position = self._stream = None
        return self._feed

    def once(self, source: Any) -> Iterator[Batch]:
        """Yield every sample once, in micro-batches with whether they count.

        All ranks get equally many.
        """
        # One micro-batch at a time, or evaluating would hold a whole window.
        plan = replace(self._plan, accumulation=1)
        if is_stream(source):
            yield from StreamFeed(source, plan, self._device, last="short")
            return
        begin = DataPosition(length=len(source), shuffle=False, seed=0)
        sampler = RankBatches(
            plan, self._rank, start=begin, epochs=1, last="short", evaluates=True
        )
        yield from DatasetFeed(source, sampler, begin, self._device)

    def steps_per_epoch(self, source: Any, last: Last) -> int:
        """Return how many steps an epoch has; collective for streams."""
        if is_stream(source):
            return agreed_steps(source, self._plan, self._device, last)
        return steps_of_epoch(len(source), self._plan, last)

    def state(self) -> dict[str, Any] | None:
        """Return this rank's place in a stream of its own, if it reads one."""
        if not isinstance(self._feed, StreamFeed):
            return self._stream
        stream: Any = self._feed.stream
        own = stream.state_dict() if _keeps_state(stream) else None
        return {"taken": self._feed.taken, "own": own}

    def restore(
        self, position: dict[str, Any] | None, stream: dict[str, Any] | None
    ) -> None:
        """Let the next feed go on from there."""
        self._feed = None
        self._position = DataPosition.from_json(position) if position else None
        self._stream = stream

    def _begin(
        self, fresh: DataPosition, start: int | DataPosition | None
    ) -> DataPosition:
        if start is None:
            start = self._position
        if start is None:
            return fresh
        if isinstance(start, int):
            per_epoch = max(1, fresh.length // self._plan.global_batch)
            epoch, steps = divmod(start, per_epoch)
            samples = steps * self._plan.global_batch
            return replace(fresh, epoch=epoch, samples=samples)
        if replace(start, epoch=0, samples=0) != fresh:
            raise UsageError(
                f"the checkpoint stopped in other data: {_described(start)}, and this "
                f"is {_described(fresh)}; samples would come twice or never: give the "
                "same dataset, shuffle and seed, or begin anew with start=0"
            )
        return start

    def _from_stream(
        self,
        stream: Any,
        epochs: int | None,
        start: int | DataPosition | None,
        last: Last,
    ) -> StreamFeed:
        skip = 0
        if isinstance(start, int):
            skip = start * self._plan.accumulation
        elif self._stream is not None and start is None:
            if "moved" in self._stream:
                raise UsageError(self._stream["moved"])
            own = self._stream["own"]
            if own is None:
                skip = self._stream["taken"]
            elif _keeps_state(stream):
                stream.load_state_dict(own)
            else:
                raise UsageError(
                    f"the checkpoint holds the state of a loader, and this "
                    f"{type(stream).__name__} has no load_state_dict; give the same "
                    "kind of loader, or begin anew with start=0"
                )
        return StreamFeed(
            stream, self._plan, self._device, epochs=epochs, last=last, skip=skip
        )


def _position_in(folder: str | Path) -> DataPosition:
    data = CheckpointFolder(folder).progress().get("data")
    if data is None:
        raise UsageError(
            f"the checkpoint {str(folder)!r} holds no place in a dataset: its run read "
            "a stream, whose places are each rank's own; use engine.load"
        )
    return DataPosition.from_json(data)


def _keeps_state(stream: Any) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def _described(position: DataPosition) -> str:
    order = f"shuffled with seed {position.seed}" if position.shuffle else "in order"
    return f"{position.length} samples, {order}"
