"""Units of what people read and write; inside, bytes are `int` and seconds `float`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bigmodel.errors import UsageError, Violation

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9

_SUFFIXES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def format_bytes(count: float) -> str:
    """Write bytes the way people compare them: `81.25 GiB`, `3.10 MiB`."""
    for limit, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= limit:
            return f"{count / limit:.2f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Write a duration with three figures: `1.24 s`, `37.0 ms`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"


def format_count(count: float) -> str:
    """Write a large count with three figures: `8.03e9` becomes `8.03 B`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= limit:
            return f"{count / limit:.2f} {unit}"
    return f"{count:.0f}"


def parse_bytes(text: str | int, *, field: str = "memory") -> int:
    """Read `"72GiB"`, `"80GB"`, `"512 MiB"` or a plain number of bytes.

    Raises:
        UsageError: The text is no size, or the size is not positive.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    suffix = (match[2].upper() or "B") if match else ""
    if match is None or suffix not in _SUFFIXES or float(match[1]) <= 0:
        raise UsageError(
            Violation(
                field=field,
                got=text,
                rule="it must be a positive size such as '80GiB' or '512MB'",
                cure="GiB is 2**30 bytes, GB is 10**9",
            )
        )
    return int(float(match[1]) * _SUFFIXES[suffix])


def format_ranges(numbers: Iterable[int]) -> str:
    """Return rising whole numbers with runs as ranges: 0-3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    )
