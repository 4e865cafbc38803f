"""Sequences of unequal lengths, packed into rows of at most a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from bigmodel.errors import UsageError, Violation


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return which sequences share a row: first fit, longest first.

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
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[index]
        if size > capacity:
            raise UsageError(
                Violation(
                    field=f"length of sequence {index}",
                    got=size,
                    rule=f"a row holds {capacity} tokens",
                    cure="cut the sequence, or raise the capacity",
                )
            )
        row = next((r for r, left in enumerate(free) if left >= size), None)
        if row is None:
            rows.append([])
            free.append(capacity)
            row = len(rows) - 1
        rows[row].append(index)
        free[row] -= size
    return rows
