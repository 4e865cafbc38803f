"""Versions that a result was made with."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

import bigmodel


def versions(libraries: Iterable[str]) -> dict[str, str | None]:
    """Return the version of this library and of others; None: it is not installed."""
    found: dict[str, str | None] = {"bigmodel": bigmodel.__version__}
    for name in libraries:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
