"""Which blocks are equal, and which of them must really be traced.

    period 1, 8 blocks:     real real real skip skip skip skip real
                                       ^ template of the skipped ones
    period 2 (A B A B ...): real for the first three periods and the last one

The first block of a row often differs in what it shares (a position bias that later
blocks reuse), and the last one hands over to something else; the template has a traced
neighbour of its own kind on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

_LARGEST_PERIOD = 8
_INDEX_WORDS = ("idx", "index", "layer_id", "layer_num", "block_id", "name")


@dataclass(frozen=True, slots=True)
class Row:
    """Blocks of one container, by index among all blocks."""

    first: int
    length: int
    period: int
    """Distance between equal blocks; 0 when no repetition was found."""

    @property
    def template_start(self) -> int:
        """Index of the first block that stands for skipped ones."""
        return self.first + 2 * self.period

    def is_real(self, index: int) -> bool:
        """Say whether the block with this index is traced itself."""
        if not self.period or self.length <= 4 * self.period:
            return True
        return (
            index < self.first + 3 * self.period
            or index >= self.first + self.length - self.period
        )

    def template_of(self, index: int) -> int:
        """Return the index of the traced block that stands for this one."""
        if self.is_real(index):
            return index
        return self.template_start + (index - self.template_start) % self.period


def find_rows(paths: Sequence[str], blocks: Sequence[nn.Module]) -> tuple[Row, ...]:
    """Group blocks by container and find the period of each group."""
    rows: list[Row] = []
    start = 0
    signatures = [_signature(block) for block in blocks]
    for index in range(1, len(paths) + 1):
        if index == len(paths) or _container(paths[index]) != _container(paths[start]):
            rows.append(_row(start, signatures[start:index]))
            start = index
    return tuple(rows)


def without_repetition(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the same rows with every block traced itself."""
    return tuple(Row(row.first, row.length, 0) for row in rows)


def _row(first: int, signatures: Sequence[Any]) -> Row:
    length = len(signatures)
    for period in range(1, _LARGEST_PERIOD + 1):
        # A pipeline may end within a period; the tail still repeats.
        if all(a == b for a, b in zip(signatures, signatures[period:], strict=False)):
            if length % period == 0 and length > 4 * period:
                return Row(first, length, period)
            break
    return Row(first, length, 0)


def _container(path: str) -> str:
    return path.rpartition(".")[0]


def _signature(module: nn.Module) -> Any:
    """Return what makes two blocks equal: classes, shapes and plain settings."""
    plain = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str))
        and not any(word in name for word in _INDEX_WORDS)
    )
    tensors = tuple(
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for kind in (module._parameters, module._buffers)
        for name, tensor in kind.items()
        if tensor is not None
    )
    children = tuple(
        (name, _signature(child)) for name, child in module.named_children()
    )
    return type(module).__qualname__, plain, tensors, children
