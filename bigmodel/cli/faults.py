"""From what the library raises to what a shell sees: a message and an exit code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from bigmodel.errors import BigModelError, UsageError, Violation

INTERRUPTED = 130
"""What shells report after Ctrl-C."""


def reporting_faults(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command end with a message on stderr instead of a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BigModelError as error:
            console = Console(stderr=True, highlight=False)
            message = Text("error: ", style="bold red") + Text(str(error))
            console.print(message, soft_wrap=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return run


def counts_violations(counts: Mapping[str, int | None]) -> list[Violation]:
    """Return what is wrong with whole numbers that must be at least 1, by option."""
    return [
        Violation(
            field=option, got=count, rule="it must be a whole number of at least 1"
        )
        for option, count in counts.items()
        if count is not None and count < 1
    ]


def choice_violations(
    option: str, got: str | None, known: tuple[str, ...]
) -> list[Violation]:
    """Return what is wrong with a choice among names."""
    if got is None or got in known:
        return []
    return [Violation(field=option, got=got, rule=f"known: {', '.join(known)}")]


def folder_violations(paths: Mapping[str, Path | None]) -> list[Violation]:
    """Return the files to write whose folder does not exist, by option."""
    return [
        Violation(
            field=option,
            got=str(path),
            rule=f"there is no folder {str(path.absolute().parent)!r}",
            cure="make it first, or name another file",
        )
        for option, path in paths.items()
        if path is not None and not path.absolute().parent.is_dir()
    ]


def write(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}") from None
