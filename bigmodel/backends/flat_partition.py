"""How ZeRO 1 and 2 cut the trained parameters into equal pieces, one for every rank.

Source: deepspeed 0.19, `runtime/zero/stage_1_and_2.py`. All trained parameters lie one
after another in a flat buffer whose length is a multiple of two elements per rank; a
rank owns one piece of it, which begins and ends within parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ALIGNMENT = 2
"""`nccl_start_alignment_factor`."""


class FlatPartition:
    """The pieces of a flat buffer.

    Args:
        params: Elements of the parameters by name, in the order of the buffer.
        ranks: How many pieces.
    """

    def __init__(self, params: Mapping[str, int], ranks: int) -> None:
        used = sum(params.values())
        self.piece = -(-used // (_ALIGNMENT * ranks)) * _ALIGNMENT
        """Elements that a rank owns, padding included."""
        self.total = self.piece * ranks
        """Elements of the buffer."""
        self._sizes = params
        self._owners: dict[str, tuple[tuple[int, int], ...]] = {}
        self._whole: dict[int, int] = {}
        self._pieces: dict[int, list[int]] = {}
        offset = 0
        for name, size in params.items():
            self._owners[name] = owners = tuple(self._cut(offset, offset + size))
            for rank, count in owners:
                self._whole[rank] = self._whole.get(rank, 0) + size
                self._pieces.setdefault(rank, []).append(count)
            offset += size

    def kinds(self, most: int) -> dict[int, tuple[int, ...]]:
        """Return ranks that stand for all, each with those that it stands for.

        Args:
            most: Up to this many ranks each stands for itself. Of more, the last owner
                does, whose gradients are the first to come, and the one that owns bits
                of the largest parameters stands for the rest: never too low.
        """
        ranks = tuple(range(self.total // self.piece)) if self.piece else (0,)
        if len(ranks) <= most:
            return {rank: (rank,) for rank in ranks}
        heaviest = max(self._whole, key=lambda rank: self._whole[rank], default=0)
        last = max(self._whole, default=0)
        rest = tuple(rank for rank in ranks if rank != last)
        if heaviest == last:
            return {last: ranks}
        return {heaviest: rest, last: (last,)}

    @property
    def largest_param(self) -> int:
        """Elements of the largest parameter."""
        return max(self._sizes.values(), default=0)

    def size(self, name: str) -> int:
        """Return the elements of a parameter."""
        return self._sizes[name]

    def whole(self, rank: int) -> int:
        """Return the elements of the parameters that a rank owns at least a bit of."""
        return self._whole.get(rank, 0)

    def largest(self, rank: int) -> int:
        """Return the elements of the largest bit of a parameter that a rank owns."""
        return max(self._pieces.get(rank, ()), default=0)

    def is_one_view(self, rank: int) -> bool:
        """Say whether a rank's piece lies within one parameter."""
        return self._pieces.get(rank) == [self.piece]

    def owns(self, rank: int, name: str) -> bool:
        """Say whether a rank owns a bit of a parameter."""
        return any(owner == rank for owner, _ in self._owners[name])

    def chunks(
        self, names: Iterable[str], limit: int, apart: int | None = None
    ) -> list[tuple[int, ...]]:
        """Return the elements of the slices that are reduced together, chunk by chunk.

        Neighbours of the same owner are one slice of the bucket (`average_tensor`). A
        chunk is closed as soon as it exceeds the limit (`allreduce_and_scatter`).

        Args:
            names: Parameters in the order in which they were put into the bucket.
            limit: `reduce_bucket_size`.
            apart: A rank whose slices are not joined.
        """
        slices: list[tuple[int, int]] = []
        for name in names:
            for owner, count in self._owners[name]:
                if slices and slices[-1][0] == owner != apart:
                    slices[-1] = (owner, slices[-1][1] + count)
                else:
                    slices.append((owner, count))
        found: list[tuple[int, ...]] = []
        chunk: list[int] = []
        for _, count in slices:
            chunk.append(count)
            if sum(chunk) > limit:
                found.append(tuple(chunk))
                chunk = []
        return [*found, tuple(chunk)] if chunk else found

    def piece_of(self, rank: int, name: str) -> int:
        """Return the elements of a parameter that a rank owns."""
        return sum(count for owner, count in self._owners[name] if owner == rank)

    def _cut(self, start: int, end: int) -> Iterable[tuple[int, int]]:
        while start < end:
            rank = start // self.piece
            stop = min(end, (rank + 1) * self.piece)
            yield rank, stop - start
            start = stop
