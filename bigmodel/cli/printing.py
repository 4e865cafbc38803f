"""Writing results on stdout, as tables or as JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console, RenderableType

_PIPE_WIDTH = 140
"""Columns where stdout is no terminal."""


def print_tables(tables: RenderableType) -> None:
    """Print tables, in the terminal's width or in one that folds no plan."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    console.print(tables)


def print_json(data: dict[str, Any]) -> None:
    """Print a document."""
    print(json.dumps(data, indent=1))


def note(text: str) -> None:
    """Say something that is no result: on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)
