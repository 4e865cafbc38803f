"""Sequences of unequal lengths, packed into rows of at most a number of tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from bigmodel.errors import UsageError, Violation


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return which sequences share a row: best fit, longest first.

        rows = bigmodel.pack([len(tokens) for tokens in dataset], capacity=2048)
        loader = DataLoader(dataset, batch_sampler=rows, collate_fn=concatenate)

    Only lengths are looked at, so all ranks can do it before training, and the steps of
    an epoch are known: every row is one item of the loader.

    Args:
        lengths: Tokens of every sequence.
        capacity: Tokens of a row.

    Raises:
        UsageError: A sequence is longer than a row.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    # Rows by the tokens that are free in them, and these numbers in order: so a million
    # sequences take seconds.
    sizes: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            raise UsageError(
                Violation(
                    field=f"length of sequence {index}",
                    got=length,
                    rule=f"a row holds {capacity} tokens",
                    cure="cut the sequence, or raise the capacity",
                )
            )
        place = bisect_left(sizes, length)
        if place < len(sizes):
            free = sizes[place]
            row = with_room[free].pop()
            if not with_room[free]:
                del with_room[free], sizes[place]
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if free > length:
            if free - length not in with_room:
                insort(sizes, free - length)
            with_room.setdefault(free - length, []).append(row)
    return rows
