"""Numbers for the units of a traced model.

0        what comes before the blocks
1 ..     the blocks of the first container, then what lies after them,
         the blocks of the second container, then what lies after them, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bigmodel.observe.repetition import Row


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Unit numbers of one model."""

    paths: tuple[str, ...]
    """Blocks in forward order."""
    rows: tuple[Row, ...]
    """Blocks grouped by container."""

    @property
    def count(self) -> int:
        """Number of units."""
        return 1 + len(self.paths) + len(self.rows)

    def row_index(self, block: int) -> int:
        """Return which row a block stands in."""
        return sum(row.first <= block for row in self.rows) - 1

    def unit_of_block(self, block: int) -> int:
        """Return the unit number of a block."""
        return 1 + block + self.row_index(block)

    def unit_after_row(self, row: int) -> int:
        """Return the number of the unit between this row of blocks and the next."""
        last = self.rows[row].first + self.rows[row].length - 1
        return self.unit_of_block(last) + 1

    @cached_property
    def traced_units(self) -> tuple[int, ...]:
        """Units that are run themselves, in forward order."""
        units = [0]
        for number, row in enumerate(self.rows):
            blocks = range(row.first, row.first + row.length)
            units += [self.unit_of_block(b) for b in blocks if row.is_real(b)]
            units.append(self.unit_after_row(number))
        return tuple(units)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {unit: position for position, unit in enumerate(self.traced_units)}

    def neighbours(self, unit: int) -> tuple[int, ...]:
        """Return a traced unit and the traced units next to it."""
        at = self._positions[unit]
        return self.traced_units[max(at - 1, 0) : at + 2]
