"""What a plan is predicted to need: memory of every rank, seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigmodel.errors import UsageError, Violation
from bigmodel.plans import Plan, document
from bigmodel.simulator import Timeline
from bigmodel.units import format_bytes, format_seconds

FORMAT = 1
"""Version of estimates and decisions as JSON; within one, keys are only added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A share of a rank's memory, with the sum that it comes from."""

    name: str
    num_bytes: int
    because: str
    """The formula with its numbers, or where the figure was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Bytes that are predicted, between the least and the most that are likely."""

    low: int
    likely: int
    high: int

    def to_dict(self) -> dict[str, int]:
        """Return plain data for JSON."""
        return {"low": self.low, "likely": self.likely, "high": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMemory:
    """What a unit of the model holds at a rank's peak."""

    unit: str
    """Path of a block; `(before the blocks)`, `(after the blocks)`; `(root)`: FSDP's
    group of all that is in no block; empty: what belongs to no single unit."""
    holders: tuple[tuple[str, int], ...]
    """Bytes by who holds them, largest first."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all holders."""
        return sum(count for _, count in self.holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of ranks that do the same: all of a pipeline stage, or some of them."""

    stage: int
    ranks: tuple[int, ...]
    allocated: int
    """Peak of the bytes that tensors hold: `torch.cuda.max_memory_allocated`."""
    reserved: int
    """Peak of what the allocator takes from the device: `max_memory_reserved`."""
    device_total: int
    """What the driver reports at the peak, with context and communicators."""
    moment: str
    """What runs when `allocated` is at its peak."""
    terms: tuple[Term, ...]
    """Who holds `device_total`, largest first; they add up to it."""
    intervals: tuple[Interval, Interval, Interval]
    """Of `allocated`, `reserved` and `device_total`."""
    units: tuple[UnitMemory, ...] = ()
    """Which unit holds how much of `allocated`, in forward order; they add up to it.
    Empty in a search, which looks at sums alone."""
    host: int = 0
    """Bytes that the plan keeps in the machine's memory for this rank."""
    disk: int = 0
    """Bytes that the plan keeps on the machine's disk for this rank."""

    @property
    def numbers(self) -> dict[str, Interval]:
        """`intervals` by the number that each is of."""
        names = ("allocated", "reserved", "device_total")
        return dict(zip(names, self.intervals, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "stage": self.stage,
            "ranks": list(self.ranks),
            "peak_allocated_bytes": self.allocated,
            "peak_reserved_bytes": self.reserved,
            "device_total_bytes": self.device_total,
            "intervals": {
                name: interval.to_dict() for name, interval in self.numbers.items()
            },
            "host_bytes": self.host,
            "disk_bytes": self.disk,
            "moment": self.moment,
            "terms": [
                {"name": t.name, "bytes": t.num_bytes, "because": t.because}
                for t in self.terms
            ],
            "units": [
                {"unit": u.unit, "bytes": u.num_bytes, "holders": dict(u.holders)}
                for u in self.units
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A change of a plan that may save memory, and what it comes to by simulation.

    Savings are differences between the fullest ranks of two predictions; negative where
    the change needs more.
    """

    name: str
    """What is changed, in words."""
    plan: Plan
    """The changed plan: for the same global batch."""
    saved_allocated: int
    saved_device_total: int
    device_total: Interval
    """Of the changed plan's fullest rank."""
    seconds: float
    """One optimizer step of the changed plan."""
    fits: bool
    """Whether the changed plan fits."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "name": self.name,
            "plan": document.to_dict(self.plan),
            "saved_allocated_bytes": self.saved_allocated,
            "saved_device_total_bytes": self.saved_device_total,
            "device_total": self.device_total.to_dict(),
            "seconds": self.seconds,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory and time of one plan on one cluster."""

    plan: Plan
    ranks: tuple[RankMemory, ...]
    """One entry for every pipeline stage, or several where its ranks differ."""
    capacity: int
    """Bytes that one device has."""
    low: int
    """Least device total of the fullest rank that is likely."""
    high: int
    """Largest device total of the fullest rank that is likely; a plan fits when this
    does."""
    seconds: float
    """One optimizer step."""
    compute_seconds: float
    """Of the slowest rank's step, the time in which it computes."""
    exposed_seconds: float
    """The rest: communication that nothing hides, and the bubble of a pipeline."""
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOP utilisation against the dense peak (PaLM, arXiv 2204.02311): without
    recomputation."""
    timelines: tuple[Timeline, ...] = ()
    """Of the simulated micro-batches, one for every entry of `ranks`."""
    measures: tuple[Measure, ...] = ()
    """What would save memory, the largest saving first; empty where nobody asked."""

    @property
    def fullest(self) -> RankMemory:
        """The rank with the largest device total."""
        return max(self.ranks, key=lambda rank: rank.device_total)

    def of_rank(self, rank: int | None) -> RankMemory:
        """Return the memory of one rank; None: of the fullest.

        Raises:
            UsageError: The plan has no such rank.
        """
        if rank is None:
            return self.fullest
        for entry in self.ranks:
            if rank in entry.ranks:
                return entry
        count = sum(len(entry.ranks) for entry in self.ranks)
        raise UsageError(
            Violation(
                field="rank",
                got=rank,
                rule=f"the plan has {count} ranks, 0 to {count - 1}",
                cure="name one of them, or leave it out for the fullest",
            )
        )

    def timeline_of(self, memory: RankMemory) -> Timeline | None:
        """Return the timeline of an entry of `ranks`; None where there is none."""
        if not self.timelines:
            return None
        return self.timelines[self.ranks.index(memory)]

    @property
    def fits(self) -> bool:
        """Say whether the fullest rank fits, to the upper end of the interval."""
        return self.high <= self.capacity

    @property
    def missing(self) -> int:
        """Bytes by which the fullest rank misses the capacity; 0 when it fits."""
        return max(self.high - self.capacity, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: bytes are int, seconds float; no timelines."""
        return {
            "format": FORMAT,
            "plan": document.to_dict(self.plan),
            "digest": document.digest(self.plan),
            "description": self.plan.describe(),
            "fits": self.fits,
            "capacity_bytes": self.capacity,
            "low_bytes": self.low,
            "high_bytes": self.high,
            "missing_bytes": self.missing,
            "seconds": self.seconds,
            "compute_seconds": self.compute_seconds,
            "exposed_seconds": self.exposed_seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "fullest_stage": self.fullest.stage,
            "stages": [rank.to_dict() for rank in self.ranks],
            "measures": [measure.to_dict() for measure in self.measures],
        }

    def __str__(self) -> str:
        return (
            f"{self.plan.describe()}: {format_seconds(self.seconds)} a step, "
            f"{self.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
            f"{format_bytes(self.fullest.device_total)} of "
            f"{format_bytes(self.capacity)}"
        )
