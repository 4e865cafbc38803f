"""Rules that fields of several blocks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from bigmodel.errors import Violation


def positive(field: str, value: float) -> Iterator[Violation]:
    """Yield a violation unless the value is above 0."""
    if value <= 0:
        yield Violation(field=field, got=value, rule="it must be positive")


def not_negative(field: str, value: float) -> Iterator[Violation]:
    """Yield a violation if the value is below 0."""
    if value < 0:
        yield Violation(field=field, got=value, rule="it must not be negative")


def one_of(field: str, value: object, kind: Any) -> Iterator[Violation]:
    """Yield a violation unless the value is one of a Literal's."""
    known = get_args(kind)
    if value not in known:
        yield Violation(
            field=field, got=value, rule=f"it must be one of {', '.join(known)}"
        )
