"""What each unit of the model holds at the peak, equal neighbours in one row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from bigmodel.search.prediction import UnitMemory
from bigmodel.units import format_bytes

_LEAST = 0.01
"""Of a row's bytes: holders of less are not named."""


@dataclass(frozen=True, slots=True)
class UnitRow:
    """Units that hold the same, one after another."""

    name: str
    count: int
    each: int
    """Bytes of one unit."""
    holders: str
    """Who holds them, in words."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all units together."""
        return self.count * self.each


def unit_rows(units: Iterable[UnitMemory]) -> tuple[UnitRow, ...]:
    """Return the rows of a rank, in forward order."""
    rows = []
    for _, group in groupby(units, key=lambda unit: unit.holders):
        alike = list(group)
        rows.append(
            UnitRow(
                name=_name(alike[0].unit, alike[-1].unit),
                count=len(alike),
                each=alike[0].num_bytes,
                holders=_holders(alike[0]),
            )
        )
    return tuple(rows)


def _name(first: str, last: str) -> str:
    if not first:
        return "of no single unit"
    if first == "(root)":
        return "FSDP's root group: all that is in no block"
    if first == last:
        return first
    head, _, begin = first.rpartition(".")
    other, _, end = last.rpartition(".")
    if head == other:
        return f"{head}.{begin} to {end}" if head else f"{begin} to {end}"
    return f"{first} to {last}"


def _holders(unit: UnitMemory) -> str:
    whole = unit.num_bytes
    named = [held for held in unit.holders if abs(held[1]) >= _LEAST * whole]
    rest = whole - sum(count for _, count in named)
    words = [f"{kind} {format_bytes(count)}" for kind, count in named]
    return ", ".join([*words, *([f"others {format_bytes(rest)}"] if rest else [])])
