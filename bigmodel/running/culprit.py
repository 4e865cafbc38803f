"""Which rank failed first and why, from what all ranks of a machine left behind.

The process that ends first is often not the one to blame: its connection to the one
that failed was closed, while that one still prints its traceback.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigmodel.running.failure_report import FailureReport, read_report
from bigmodel.running.lookout import says_silence

_LAST_LINES = 20
"""Lines of a failed process that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What a process left behind."""

    rank: int
    code: int | None
    """Exit code, negative for a signal; None where the launcher had to end it."""
    error_file: Path
    stderr: Path | None
    """None where the output went to the launcher's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The rank that failed first."""

    code: int
    """Exit code, as a shell reports it."""
    lines: Sequence[str]
    """The end of its output, where that was not shown already."""
    summary: str
    """Rank, error and message, in one line."""


def find_culprit(leftovers: Sequence[Leftover], first: int) -> Culprit:
    """Return which rank to blame.

    Args:
        leftovers: Of all ranks of this machine.
        first: The rank whose process was seen to end first.
    """
    by_rank = {leftover.rank: leftover for leftover in leftovers}
    reports = {
        rank: report
        for rank, leftover in by_rank.items()
        if (report := read_report(leftover.error_file)) is not None
    }
    rank = _choose(by_rank, reports, first)
    return _describe(by_rank[rank], reports.get(rank))


def _choose(
    leftovers: Mapping[int, Leftover], reports: Mapping[int, FailureReport], first: int
) -> int:
    causes = [rank for rank, report in reports.items() if not report.is_consequence]
    if causes:
        return min(causes, key=lambda rank: (reports[rank].time_ns, rank))
    # Scripts that write no report: the traceback comes before the connections close.
    unaware = [rank for rank in leftovers if rank not in reports]
    guilty = [
        rank
        for rank in unaware
        if (lines := _end_of(leftovers[rank].stderr))
        and _is_error(lines[-1])
        and not says_silence("\n".join(_error_text(lines)))
    ]
    if guilty and first not in guilty:
        return guilty[0]
    if first in reports and unaware:
        # It only lost another rank; one that ended without a word is the better guess.
        not_to_blame = (None, 0, -signal.SIGTERM)
        ended = [rank for rank in unaware if leftovers[rank].code not in not_to_blame]
        return ended[0] if ended else first
    return first


def _describe(leftover: Leftover, report: FailureReport | None) -> Culprit:
    code = leftover.code
    if code is None or code in (0, -signal.SIGTERM):
        # It was ended while it was still leaving; its report says how it meant to end.
        code = report.exit_code if report else 1
    elif code == -signal.SIGALRM and report:
        # It could not leave, and ended itself: see run_main.
        code = report.exit_code
    elif code < 0:
        code = 128 - code
    summary = f"rank {leftover.rank} failed with exit code {code}"
    if code > 128 and code - 128 in set(signal.Signals):
        summary += f" (ended by {signal.Signals(code - 128).name})"
    lines = _end_of(leftover.stderr)
    shown = [f"the end of {leftover.stderr}:", *lines] if lines else []
    if report is not None:
        summary += f" in {report.where}" if report.where else ""
        summary += f": {report.message}"
        if not any(line.startswith('  File "') for line in lines):
            # An error of this library: it stands in the summary.
            shown = []
        if not lines and report.traceback and leftover.code is None:
            shown = report.traceback.splitlines()[-_LAST_LINES:]
    elif lines and _is_error(lines[-1]):
        summary += f": {lines[-1]}"
    return Culprit(code=code, lines=shown, summary=summary)


def _end_of(file: Path | None) -> list[str]:
    if file is None or not file.is_file():
        return []
    with file.open(errors="replace") as text:
        # torch begins the lines of a traceback with the rank.
        lines = (re.sub(r"^\[rank\d+\]: ", "", line.rstrip()) for line in text)
        return list(deque((line for line in lines if line), _LAST_LINES))


def _is_error(line: str) -> bool:
    """Whether a line may end a traceback: `ValueError: boom`."""
    name = line.split(":")[0].split(".")[-1]
    return name.isidentifier() and name.endswith(("Error", "Exception", "Interrupt"))


def _error_text(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines of the last error's text, after its traceback."""
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith(" "):
            return lines[index + 1 :]
    return lines
