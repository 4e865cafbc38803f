"""Who is missing when a collective fails: what every rank last wrote to the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from bigmodel.errors import WorkerError
from bigmodel.running.rendezvous import Membership

_PATIENCE_SECONDS = 3.0
"""How long to wait for other ranks to report that they are stuck too."""

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

    @contextmanager
    def watch(self, where: str) -> Iterator[None]:
        """Run one collective call; a silent rank becomes a `WorkerError` with its name.

        Args:
            where: What is done, as messages say it: `step 7`.

        Raises:
            WorkerError: Another rank is behind, has failed, or has ended.
        """
        self._count += 1
        self._where = where
        if self._member.world == 1:
            yield
            return
        try:
            self._member.store.set(f"at/{self._member.rank}", f"{self._count} {where}")
            yield
        except RuntimeError as error:
            if not _is_silence(error):
                self._report("failed", str(error))
                raise
            self._report("stuck", "")
            raise WorkerError(self._explain(error)) from error
        except Exception as error:
            self._report("failed", f"{type(error).__name__}: {error}")
            raise

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
                    f"rank {other} failed: {text}" for other, text in failed.items()
                )
            )
        if behind:
            return (
                begin
                + "waited in vain for "
                + "; ".join(
                    f"rank {other}, which only came to {where}"
                    for other, where in behind.items()
                )
            )
        if silent:
            names = ", ".join(f"rank {other}" for other in silent)
            return f"{begin}lost {names}: look at the output of that process"
        return f"{begin}lost the network; every rank still answers: {error}"

    def _ask(self) -> tuple[dict[int, str], dict[int, str], list[int]]:
        """Return who failed with what, who is behind where, and who says nothing."""
        store = self._member.store
        me, world = self._member.rank, self._member.world
        others = [rank for rank in range(world) if rank != me]
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
            text = "0 its start"
            if store.check([f"at/{rank}"]):
                text = store.get(f"at/{rank}").decode()
            count, where = text.split(" ", maxsplit=1)
            if int(count) < self._count:
                behind[rank] = where
        return failed, behind, silent


def _is_silence(error: RuntimeError) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)
