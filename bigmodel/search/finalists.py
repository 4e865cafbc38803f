"""The plans that a search may return, fastest first, and which of them really fit.

A plan enters by its seconds and the least memory that it can need; what the allocator
makes of it is replayed only when it stands among those to return, and it leaves if it
does not fit then. The result is that of replaying every plan: see `predict` in
`predicting.py`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from bigmodel.plans import Plan
from bigmodel.search.prediction import Estimate


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    seconds: float
    order: int
    """Of enumeration; it breaks ties."""
    estimate: Estimate = field(compare=False)
    verified: bool = field(compare=False, default=False)


class Finalists:
    """Keeps the fastest plans.

    Args:
        keep: How many are wanted.
        verify: Returns the estimate of a plan with what the allocator reserves.
    """

    def __init__(self, keep: int, verify: Callable[[Plan], Estimate]) -> None:
        self._keep = keep
        self._verify = verify
        self._entries: list[_Entry] = []
        self.misfits: list[Estimate] = []
        """Those that do not fit once replayed, in the order in which that was seen."""

    def add(self, order: int, estimate: Estimate) -> None:
        """Let a plan in that may fit."""
        insort(self._entries, _Entry(estimate.seconds, order, estimate))

    @property
    def slowest(self) -> float:
        """Seconds of the slowest plan to return; infinite while there are too few."""
        if len(self._entries) < self._keep:
            return float("inf")
        return self._entries[self._keep - 1].seconds

    def are_faster_than(self, bound: float) -> bool:
        """Say whether no plan with this lower bound of seconds can get in any more."""
        while bound >= self.slowest:
            if self._settle():
                return True
        return False

    def best(self) -> list[Estimate]:
        """Return the plans, fastest first; no more are let in."""
        while not self._settle():
            pass
        return [entry.estimate for entry in self._entries[: self._keep]]

    def others(self) -> list[Estimate]:
        """Return the plans that are slower, as they were let in."""
        return [entry.estimate for entry in self._entries[self._keep :]]

    def _settle(self) -> bool:
        """Verify those to return; say whether all of them fit."""
        for index, entry in enumerate(self._entries[: self._keep]):
            if entry.verified:
                continue
            estimate = self._verify(entry.estimate.plan)
            if not estimate.fits:
                self.misfits.append(estimate)
                del self._entries[index]
                return False
            self._entries[index] = _Entry(
                entry.seconds, entry.order, estimate, verified=True
            )
        return True
