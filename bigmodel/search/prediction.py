"""What a plan is predicted to need: memory of every rank, seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bigmodel.plans import Plan, document
from bigmodel.simulator import Timeline
from bigmodel.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A share of a rank's memory, with the sum that it comes from."""

    name: str
    num_bytes: int
    because: str
    """The formula with its numbers, or where the figure was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of the fullest rank of one pipeline stage; without stages, of all ranks.

    Ranks of a stage differ only under DeepSpeed's stages 1 and 2, which cut the row of
    all parameters into equal parts wherever the cuts fall.
    """

    stage: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory and time of one plan on one cluster."""

    plan: Plan
    ranks: tuple[RankMemory, ...]
    """One entry for every pipeline stage."""
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
    """Of the simulated micro-batches, one for every stage."""

    @property
    def fullest(self) -> RankMemory:
        """The rank with the largest device total."""
        return max(self.ranks, key=lambda rank: rank.device_total)

    @property
    def fits(self) -> bool:
        """Say whether the fullest rank fits, to the upper end of the interval."""
        return self.high <= self.capacity

    @property
    def missing(self) -> int:
        """Bytes by which the fullest rank misses the capacity; 0 when it fits."""
        return max(self.high - self.capacity, 0)

    def __str__(self) -> str:
        return (
            f"{self.plan.describe()}: {format_seconds(self.seconds)} a step, "
            f"{self.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
            f"{format_bytes(self.fullest.device_total)} of "
            f"{format_bytes(self.capacity)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A plan that was not chosen, and the first reason why."""

    plan: Plan
    reason: str
    estimate: Estimate | None = None
    """Where it was simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The fastest plan that fits, and what became of the others."""

    model: str
    """The model in words."""
    cluster: str
    """The cluster in words."""
    global_batch: int
    best: Estimate
    runners_up: tuple[Estimate, ...]
    """The next fastest plans that fit."""
    rejected: tuple[Rejected, ...]
    considered: int
    """Plans that were enumerated."""
    simulated: int
    """Plans that were simulated; the others were ruled out by a bound or a rule."""

    @property
    def plan(self) -> Plan:
        """The plan that was chosen."""
        return self.best.plan

    def save(self, path: str | Path) -> Path:
        """Write the plan file, with what was predicted beside the plan."""
        return document.save(
            self.plan,
            path,
            model=self.model,
            cluster=self.cluster,
            predicted={
                "seconds": self.best.seconds,
                "tokens_per_second_per_gpu": self.best.tokens_per_second_per_gpu,
                "peak_allocated_bytes": self.best.fullest.allocated,
                "peak_reserved_bytes": self.best.fullest.reserved,
                "device_total_bytes": self.best.fullest.device_total,
            },
        )

    def __str__(self) -> str:
        lines = [
            f"{self.model} on {self.cluster}, global batch {self.global_batch}",
            f"  best       {self.best}",
            *(f"  runner-up  {estimate}" for estimate in self.runners_up),
            f"  {self.considered} plans considered, {self.simulated} simulated, "
            f"{len(self.rejected)} rejected",
        ]
        return "\n".join(lines)
