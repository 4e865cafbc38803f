"""Who is missing when a collective fails: what every rank last wrote to the store."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from bigmodel.errors import WorkerError
from bigmodel.running.failure_report import (
    forget_failure,
    phase_of,
    record_failure,
)
from bigmodel.running.rendezvous import Membership

_PATIENCE_SECONDS = 3.0
"""How long to wait for other ranks to report that they are stuck too."""

_MEETING_SECONDS = 10.0
"""How long to look, before a rare collective, whether a rank does something else."""

_AT_THE_END = 10**9
"""Number of the call that a rank is in when it makes none any more."""

_SIGNS = (
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "connection refused",
    "connect failed",
    "broken pipe",
    "socketunexpectedlyclosed",
)
"""What gloo, which raises plain RuntimeErrors, says when a rank is silent."""


class Lookout:
    """Writes where this rank is to where the others can read it."""

    def __init__(self, membership: Membership) -> None:
        self._member = membership
        self._count = 0
        self._where = ""
        self._failed_before = False

    @contextmanager
    def watch(self, where: str, *, meet: bool = False) -> Iterator[None]:
        """Run one collective call; a silent rank becomes a `WorkerError` with its name.

        Args:
            where: What is done, as messages say it: `step 7`.
            meet: Whether to find out first that no rank does something else.

        Raises:
            WorkerError: Another rank is behind, has failed, or has ended.
        """
        self._count += 1
        self._where = where
        if self._member.world == 1:
            yield
            return
        if self._failed_before:
            self._survived()
        self._where = f"{where} ({_callers_line()})"
        try:
            self._member.store.set(
                f"at/{self._member.rank}", f"{self._count} {self._where}"
            )
            if meet:
                self._meet(where)
            yield
        except RuntimeError as error:
            if not says_silence(error):
                self._failed(error)
                raise
            self._failed_before = True
            self._report("stuck", "")
            silence = WorkerError(self._explain(error))
            record_failure(silence, where)
            raise silence from error
        except Exception as error:
            self._failed(error)
            raise

    def _failed(self, error: Exception) -> None:
        """Tell the launcher and the other ranks, before anything is torn down."""
        self._failed_before = True
        phase = phase_of(error)
        where = f"{phase} of {self._where}" if phase else self._where
        record_failure(error, where)
        self._report("failed", f"in {where}: {type(error).__name__}: {error}")

    def _survived(self) -> None:
        """Take back what was said about a failure after which the script went on."""
        self._failed_before = False
        forget_failure()
        try:
            for kind in ("failed", "stuck"):
                self._member.store.delete_key(f"{kind}/{self._member.rank}")
        except RuntimeError:
            return  # the store went with its process; the next collective will say so

    def leave(self) -> None:
        """Tell the others that this rank has come to its end."""
        if self._member.world > 1:
            with contextlib.suppress(RuntimeError):
                self._member.store.set(
                    f"at/{self._member.rank}", f"{_AT_THE_END} the end of its run"
                )

    def _meet(self, where: str) -> None:
        """Wait until all ranks are here; one that is elsewhere will never come.

        Raises:
            WorkerError: Names the ranks that did not enter the call.
        """
        # Kept, because who has met the others may be far ahead when they look.
        self._member.store.set(f"in/{self._count}/{self._member.rank}", where)
        deadline = time.monotonic() + _MEETING_SECONDS
        while time.monotonic() < deadline:
            # The place first: who came and went in between is seen to have come.
            places = {other: self._place(other) for other in self._others()}
            places = {
                other: place
                for other, place in places.items()
                if not self._came(other, where)
            }
            if not places:
                return
            elsewhere = {
                other: place
                for other, (count, place) in places.items()
                if count > self._count
                or (count == self._count and _call(place) != where)
            }
            if elsewhere:
                names = "; ".join(
                    f"rank {other} did not enter {where}: it is in {place}"
                    for other, place in elsewhere.items()
                )
                raise WorkerError(
                    f"rank {self._member.rank} is in {where}, and {names}; all ranks "
                    "call the engine's methods together, in the same order"
                )
            time.sleep(0.02)
        # Who is only late is waited for as long as in any collective.

    def _came(self, rank: int, where: str) -> bool:
        """Say whether a rank has entered this call."""
        key = f"in/{self._count}/{rank}"
        store = self._member.store
        return store.check([key]) and store.get(key).decode() == where

    def _others(self) -> list[int]:
        return [r for r in range(self._member.world) if r != self._member.rank]

    def _place(self, rank: int) -> tuple[int, str]:
        """Return which of its calls a rank is in, and what that is."""
        text = "0 its start"
        if self._member.store.check([f"at/{rank}"]):
            text = self._member.store.get(f"at/{rank}").decode()
        count, where = text.split(" ", maxsplit=1)
        return int(count), where

    def _report(self, kind: str, text: str) -> None:
        try:
            self._member.store.set(f"{kind}/{self._member.rank}", text)
        except RuntimeError:
            return  # the store went with its process, and nobody can be told

    def _explain(self, error: RuntimeError) -> str:
        begin = f"rank {self._member.rank}, in {self._where}, "
        try:
            failed, behind, silent = self._ask()
        except RuntimeError:
            return (
                f"{begin}lost the other ranks, and the process that keeps their store "
                "(rank 0 or the launcher) has ended: look at its output"
            )
        if failed:
            return (
                begin
                + "stopped because "
                + "; ".join(
                    f"rank {other} failed {text}" for other, text in failed.items()
                )
            )
        if behind:
            return (
                begin
                + "waited in vain for "
                + "; ".join(
                    f"rank {other}, which {whereabouts}"
                    for other, whereabouts in behind.items()
                )
            )
        if silent:
            names = ", ".join(f"rank {other}" for other in silent)
            return f"{begin}lost {names}: look at the output of that process"
        return f"{begin}lost the network; every rank still answers: {error}"

    def _ask(self) -> tuple[dict[int, str], dict[int, str], list[int]]:
        """Return who failed with what, who is elsewhere, and who says nothing."""
        store = self._member.store
        others = self._others()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            failed = {
                rank: store.get(f"failed/{rank}").decode()
                for rank in others
                if store.check([f"failed/{rank}"])
            }
            silent = [rank for rank in others if not store.check([f"stuck/{rank}"])]
            if failed or not silent or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        behind = {}
        for rank in others:
            count, where = self._place(rank)
            if count < self._count:
                behind[rank] = f"only came to {where}"
            elif count == self._count and _call(where) != _call(self._where):
                behind[rank] = f"is in {where}"
        return failed, behind, silent


def says_silence(error: Exception | str) -> bool:
    """Whether an error, or its text, says only that another rank is silent."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)


def _call(where: str) -> str:
    """Return `step 3` from `step 3 (train.py:41)`."""
    return where.partition(" (")[0]


def _callers_line() -> str:
    """Return file and line of the script, or library, that called the engine."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("bigmodel.", "contextlib")
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
