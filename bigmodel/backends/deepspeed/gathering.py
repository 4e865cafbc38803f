"""When ZeRO 3 gathers weights and when it lets them go.

Source: deepspeed 0.19, `runtime/zero/partitioned_param_coordinator.py`, in the steady
state: the order in which modules run is known from the second micro-batch on
(`is_complete_trace`). At every module, forward or backward:

    fetch      what the module needs and nobody has asked for is gathered; it is waited
               for; then the weights that come next are gathered, `PREFETCH` elements
               at a time, while fewer than `MAX_LIVE` are there
    release    the module's weights go, unless they are needed again within `MAX_REUSE`
               elements of the order, or a prefetch has passed over that next use

Weights that are gathered together lie in one flat buffer. When the first of them is
waited for, all are copied out of it (`AllGatherCoalescedHandle.wait`); the buffer stays
until a module has asked for the last of them. A weight that is gathered alone is used
where it was gathered (`_all_gather_sequential`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from bigmodel.plans import Plan

PREFETCH = 50_000_000
"""`prefetch_bucket_size`, `runtime/zero/config.py`."""
MAX_LIVE = 1_000_000_000
"""`max_live_parameters`."""
MAX_REUSE = 1_000_000_000
"""`max_reuse_distance`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight that is not on every rank."""

    elements: int
    padded: int
    """Elements of all its shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """One all-gather."""

    number: int
    flat: int
    """Elements of its buffer."""
    copies: tuple[int, ...]
    """Elements of each weight that is copied out of it; empty where it is the
    weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happens to an all-gather."""

    kind: Literal["gather", "open", "drop"]
    """It is issued; it is waited for and copied out; its buffer goes."""
    gathering: Gathering


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A unit's forward or backward.

    Of what is inside a unit only gradients are seen: what its modules gather is there
    when it begins; in a backward a weight goes once its gradient is complete, all else
    at the end. Only the buffers that go with its first module go before.
    """

    before: tuple[Event, ...]
    released: tuple[int, ...]
    """Elements of each buffer that goes at its end."""
    weights: Mapping[str, int]
    """Elements of each weight that goes, by name: a module lets go of its own."""
    shared_anew: int = 0
    """Elements of weights, padded, that go for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What of the order is looked at, in elements."""

    prefetch: int = PREFETCH
    live: int = MAX_LIVE
    reuse: int = MAX_REUSE


_DEFAULT = Limits()


def limits_of(plan: Plan) -> Limits:
    """Return the limits of a plan.

    Of weights on a disk nothing is gathered ahead or kept for later: each gathered
    shard takes one of a fixed number of buffers.
    """
    if plan.offload.parameters == "disk":
        return Limits(prefetch=0, live=0, reuse=0)
    options = plan.deepspeed
    return Limits(
        prefetch=options.prefetch_bucket_size,
        live=options.max_live_parameters,
        reuse=options.max_reuse_distance,
    )


class Coordinator:
    """Follows the weights through a forward and a backward.

    Args:
        weights: By name; names that are missing are held by every rank.
        order: The modules in the order of forward and backward, each with the index of
            the visit that it belongs to and the names of its weights.
        unhooked: Places in the order of modules that are never told that their backward
            has ended: no gradient leaves them.
        limits: Those of the plan.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        order: Sequence[tuple[int, tuple[str, ...]]],
        unhooked: Collection[int] = (),
        limits: Limits = _DEFAULT,
    ) -> None:
        self._weights = weights
        self._limits = limits
        self._unhooked = unhooked
        self._order = [
            (visit, tuple(dict.fromkeys(n for n in names if n in weights)))
            for visit, names in order
        ]
        sizes = (sum(weights[n].elements for n in names) for _, names in self._order)
        self._passed = [0, *accumulate(sizes)]
        self._uses: dict[str, list[int]] = {}
        self._queue: deque[tuple[str, int]] = deque()
        for index, (_, names) in enumerate(self._order):
            for name in names:
                self._uses.setdefault(name, []).append(index)
                self._queue.append((name, index))
        self._fetched_for: dict[str, int] = {}
        self._flying: dict[str, Gathering] = {}
        self._members: dict[int, set[str]] = {}
        self._opened: set[int] = set()
        self._held: dict[str, int] = {}
        self._live = 0
        self._events: list[Event] = []
        self._let_go: set[str] = set()

    def visits(self, count: int) -> tuple[Visit, ...]:
        """Return what happens in each of the visits."""
        before: list[list[Event]] = [[] for _ in range(count)]
        released: list[list[int]] = [[] for _ in range(count)]
        weights: list[dict[str, int]] = [{} for _ in range(count)]
        anew = [0] * count
        begun: set[int] = set()
        for index, (visit, names) in enumerate(self._order):
            for event in self._fetch(index, names):
                if event.kind == "drop" and visit in begun:
                    released[visit].append(event.gathering.flat)
                else:
                    before[visit].append(event)
            if names:
                begun.add(visit)
            if index not in self._unhooked:
                sizes, first = self._release(index + 1, names)
                # One that goes again in its backward has come again in between.
                released[visit] += [
                    weights[visit][name] for name in sizes if name in weights[visit]
                ]
                weights[visit] |= sizes
                anew[visit] += first
        return tuple(
            Visit(
                before=tuple(events),
                released=tuple(buffers),
                weights=names,
                shared_anew=first,
            )
            for events, buffers, names, first in zip(
                before, released, weights, anew, strict=True
            )
        )

    @property
    def leftovers(self) -> tuple[int, ...]:
        """Elements of each weight that goes after the backward.

        See `release_backward_leftovers`.
        """
        return tuple(self._held.values())

    @property
    def leftovers_anew(self) -> int:
        """Of these, elements, padded, that go for the first time."""
        first = set(self._held) - self._let_go
        return sum(self._weights[name].padded for name in first)

    def _fetch(self, index: int, names: tuple[str, ...]) -> list[Event]:
        self._events = []
        self._gather([n for n in names if not self._is_asked_for(n)])
        for name in names:
            self._wait(name)
        missing = {n for n in names if self._fetched_for.get(n, -1) < index}
        for _ in range(len(missing)):
            name, use = self._queue.popleft()
            self._fetched_for[name] = use
        self._prefetch()
        return self._events

    def _prefetch(self) -> None:
        limit = min(self._limits.live - self._live, self._limits.prefetch)
        chosen: dict[str, None] = {}
        elements = 0
        while self._queue and elements < limit:
            name, use = self._queue.popleft()
            self._fetched_for[name] = max(self._fetched_for.get(name, -1), use)
            if name not in chosen and not self._is_asked_for(name):
                chosen[name] = None
                elements += self._weights[name].elements
        self._gather(list(chosen))

    def _is_asked_for(self, name: str) -> bool:
        return name in self._held or name in self._flying

    def _gather(self, names: list[str]) -> None:
        if not names:
            return
        weights = [self._weights[name] for name in names]
        alone = len(names) == 1
        elements = sum(weight.elements for weight in weights)
        gathering = Gathering(
            number=len(self._members),
            flat=sum(weight.padded for weight in weights),
            copies=() if alone else tuple(weight.elements for weight in weights),
        )
        self._members[gathering.number] = set(names)
        for name in names:
            self._flying[name] = gathering
        self._live += elements
        self._events.append(Event(kind="gather", gathering=gathering))

    def _wait(self, name: str) -> None:
        gathering = self._flying.pop(name, None)
        if gathering is None:
            return
        members = self._members[gathering.number]
        if gathering.number not in self._opened:
            self._opened.add(gathering.number)
            self._events.append(Event(kind="open", gathering=gathering))
        weight = self._weights[name]
        self._held[name] = weight.elements if gathering.copies else weight.padded
        members.discard(name)
        if not members and gathering.copies:
            self._events.append(Event(kind="drop", gathering=gathering))

    def _release(self, step: int, names: tuple[str, ...]) -> tuple[dict[str, int], int]:
        released: dict[str, int] = {}
        first = 0
        for name in names:
            if name in self._held and not self._is_kept(step, name):
                released[name] = self._held.pop(name)
                self._live -= self._weights[name].elements
                if name not in self._let_go:
                    first += self._weights[name].padded
                self._let_go.add(name)
        return released, first

    def _is_kept(self, step: int, name: str) -> bool:
        if self._fetched_for.get(name, -1) > step:
            return True
        uses = self._uses[name]
        at = bisect_left(uses, step)
        if at == len(uses):
            return False
        return self._passed[uses[at]] - self._passed[step] < self._limits.reuse
