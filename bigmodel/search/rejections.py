"""Rejected plans by reason: hundreds of plans fail for a handful of causes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bigmodel.plans import Plan
from bigmodel.search.prediction import Estimate

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?(?: (?:[KMGT]?i?B|m?s|us)\b)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A plan that was not chosen, and the first reason why."""

    plan: Plan
    reason: str
    estimate: Estimate | None = None
    """Where it was simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Plans that were rejected for the same reason, but for its numbers."""

    reason: str
    """The reason of the example, with its numbers."""
    count: int
    example: Rejected
    """The plan that came closest, where memory or time is known, or the first one."""


def group_rejected(rejected: Iterable[Rejected]) -> tuple[Rejection, ...]:
    """Return the groups, the one with most plans first."""
    groups: dict[str, list[Rejected]] = {}
    for entry in rejected:
        groups.setdefault(_NUMBER.sub("#", entry.reason), []).append(entry)
    found = []
    for entries in groups.values():
        example = min(entries, key=_distance)
        found.append(
            Rejection(reason=example.reason, count=len(entries), example=example)
        )
    return tuple(sorted(found, key=lambda group: -group.count))


def _distance(entry: Rejected) -> tuple[float, float]:
    if entry.estimate is None:
        return (float("inf"), 0.0)
    return (entry.estimate.missing, entry.estimate.seconds)
