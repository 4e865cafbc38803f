"""A range of a tensor's elements, as torch's distributed checkpoint can write and read.

ZeRO flattens tensors and cuts them where it likes; torch's checkpoint knows boxes. In
row-major order a range is a few of them. Elements 3 to 9 of a 4 x 3 tensor:

    . . .
    3 4 5    one box: full rows
    6 7 8
    9 . .    one box: the begin of a row

So what was written in one number of ranges can be read in any other, or whole, or as
shards of FSDP2. Padding is never part of a range.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and its size, in every dimension."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that together are elements `start` to `stop`, in their order.

    Args:
        shape: Of the whole tensor, row-major.
        start: First element.
        stop: The one after the last.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner = shape[1:]
    row = prod(inner)
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if begin:
        upto = end if first == last else row
        yield from _within_row(first, boxes(inner, begin, upto))
        if first == last:
            return
        first += 1
    if last > first:
        zeros = (0,) * len(inner)
        yield (first, *zeros), (last - first, *inner)
    yield from _within_row(last, boxes(inner, 0, end))


def _within_row(row: int, inner: Iterator[Box]) -> Iterator[Box]:
    for offsets, sizes in inner:
        yield (row, *offsets), (1, *sizes)


@final
class FlatRange:
    """Elements of a tensor from `start` on.

    Its methods with underscores are those that torch looks for in what is no tensor
    (2.13, `torch/distributed/_checkpointable.py`); it needs the planners below.

    Args:
        values: 1-dimensional; read into in place.
        shape: Of the whole tensor.
        start: Index of the first element in the flattened tensor.
    """

    def __init__(self, values: Tensor, shape: torch.Size, start: int) -> None:
        self.values = values
        """The memory of the range."""
        self._shape = shape
        self._boxes = list(boxes(tuple(shape), start, start + values.numel()))

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self._shape

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.values),
                    size=self._shape,
                ),
            )
            for index, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in self._boxes
        ]

    def part(self, index: MetadataIndex) -> Tensor:
        """Return the memory of the box that begins there."""
        at = 0
        for offsets, sizes in self._boxes:
            count = prod(sizes)
            if torch.Size(offsets) == index.offset:
                return self.values.narrow(0, at, count).view(sizes)
            at += count
        raise ValueError(f"{index} is no part of this range")


@final
class RangeSavePlanner(DefaultSavePlanner):
    """Finds the memory of ranges too."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is written at an index."""
        found = self.state_dict.get(index.fqn)
        if isinstance(found, FlatRange):
            return found.part(index)
        return super().lookup_object(index)


@final
class RangeLoadPlanner(DefaultLoadPlanner):
    """Finds the memory of ranges too."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Begin with a state in parts, as `state_files.State`."""
        ranges = {
            (part, name): value
            for part, values in state_dict.items()
            for name, value in values.items()
            if isinstance(value, FlatRange)
        }
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # torch has put None in the place of what it does not know.
        for (part, name), value in ranges.items():
            self.state_dict[f"{part}.{name}"] = state_dict[part][name] = value

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return what is read into at an index."""
        found: Any = self.state_dict.get(index.fqn)
        if isinstance(found, FlatRange):
            return found.part(index)
        return super().lookup_tensor(index)
