"""Tables of named things that can be added to: backends, schedules, devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from bigmodel.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from names to entries, in the order of addition."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Add an entry under a name that is still free."""
        if name in self._entries:
            raise ValueError(f"{self._kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        """Return the entry of this name.

        Raises:
            UnknownNameError: No entry has this name; the message lists the known ones.
        """
        if name not in self._entries:
            raise UnknownNameError(self._kind, name, self._entries)
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """Return all names in the order of addition."""
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return iter(self._entries.items())
