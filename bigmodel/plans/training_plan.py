"""The Plan: all that must be decided before a model can be trained, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from bigmodel.errors import InvalidPlanError, Violation, raise_if_any
from bigmodel.plans.mesh import Mesh
from bigmodel.plans.number_formats import NUMBER_FORMATS, NumberFormat
from bigmodel.plans.options import (
    DdpOptions,
    DeepSpeedOptions,
    FairscaleOptions,
    Fsdp2Options,
    HorovodOptions,
    Offload,
)
from bigmodel.plans.options.checks import one_of
from bigmodel.schedules import SCHEDULES, count_refusal, stages_of

Precision = Literal["fp32", "bf16", "fp16", "autocast", "autocast-fp16"]
"""`fp32`; `bf16`, `fp16`: forward and backward in that type with master weights and
optimizer states in fp32; `autocast`, `autocast-fp16`: weights and gradients in fp32,
operators in bfloat16 or float16 where torch's autocast says so. Both kinds of fp16
scale the loss."""

RecomputePolicy = Literal["none", "selective", "full"]
"""What a unit keeps for its backward: `none` recomputes nothing; `selective` keeps its
inputs and what its matrix products, convolutions and attention return, and runs the
rest of its forward again; `full` keeps only its inputs and runs all of it again."""

PRECISIONS: tuple[str, ...] = get_args(Precision)
RECOMPUTE_POLICIES: tuple[str, ...] = get_args(RecomputePolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """How a pipeline cuts the model and orders its work."""

    schedule: str
    """Name of the schedule: `gpipe`, `1f1b`, `interleaved`, `interleaved-zb`, `zbv`,
    `dualpipev`. All but the first two have several stages on a rank. `naive`: the
    stages of one process, one after another on its devices."""
    cuts: tuple[int, ...]
    """Index in `Plan.units` of the first unit of every stage but the first. What comes
    before the first unit (embeddings) belongs to the first stage, what comes after the
    last one (norm, head, loss) to the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way of training one model on one number of ranks.

    What can never be right is refused here. What is wrong for a model, a cluster or a
    backend is found by `bigmodel.search` and returned as data.

    Raises:
        InvalidPlanError: Lists every field that can never be right.
    """

    backend: str
    """Who trains: the name of a folder in `bigmodel/backends`."""
    mesh: Mesh = field(default_factory=Mesh)
    micro_batch: int = 1
    """Samples that one data-parallel rank reads in one forward."""
    accumulation: int = 1
    """Micro-batches per data-parallel rank and optimizer step."""
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    """Name in the table of optimizers, for the memory of its states."""
    units: tuple[str, ...] = ()
    """Module paths of the blocks in forward order; empty: found in the model."""
    recompute: tuple[RecomputePolicy, ...] = ()
    """Policy of every unit in `units`; empty: `none` for all."""
    zero_stage: int = 0
    """ZeRO stage of `deepspeed` (1, 2, 3), of `fairscale` (1, 2), of `ddp` (1: torch's
    ZeroRedundancyOptimizer); 0: no ZeRO."""
    stages: Stages | None = None
    """Pipeline cuts and schedule; None without a pipeline."""
    devices_per_process: int = 1
    """Devices that every process owns. More than 1 only under backends that spread a
    model over the devices of one process: `naive`, `fairscale_pipe`, `dataparallel`."""
    compile: bool = False
    """Compile every unit with `torch.compile`."""
    offload: Offload = field(default_factory=Offload)
    ddp: DdpOptions = field(default_factory=DdpOptions)
    fsdp2: Fsdp2Options = field(default_factory=Fsdp2Options)
    deepspeed: DeepSpeedOptions = field(default_factory=DeepSpeedOptions)
    fairscale: FairscaleOptions = field(default_factory=FairscaleOptions)
    horovod: HorovodOptions = field(default_factory=HorovodOptions)

    def __post_init__(self) -> None:
        raise_if_any(list(_violations(self)), InvalidPlanError)

    @property
    def number_format(self) -> NumberFormat:
        """Element types under the plan's precision."""
        return NUMBER_FORMATS[self.precision]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.mesh.world

    @property
    def num_devices(self) -> int:
        """Number of devices of all ranks."""
        return self.world * self.devices_per_process

    @property
    def local_batch(self) -> int:
        """Samples that one data-parallel rank reads per optimizer step."""
        return self.micro_batch * self.accumulation

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.local_batch * self.mesh.data_parallel

    @property
    def recomputed(self) -> int:
        """Number of units that run some of their forward again."""
        return sum(policy != "none" for policy in self.recompute)

    def recomputes(self, unit: int) -> RecomputePolicy:
        """Return the recompute policy of the unit with this index."""
        return self.recompute[unit] if self.recompute else "none"

    @property
    def num_stages(self) -> int:
        """Number of stages that the model is cut into; several may share a rank."""
        return len(self.stages.cuts) + 1 if self.stages else 1

    def rank_stages(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the stages of one rank of a pipeline, first one first."""
        if self.stages is None:
            return (0,)
        if self.mesh.pipeline == 1:
            return tuple(range(self.num_stages))
        placement = "one"
        if self.stages.schedule in SCHEDULES:
            placement = SCHEDULES.get(self.stages.schedule).placement
        return stages_of(pipeline_rank, self.mesh.pipeline, self.num_stages, placement)

    def stage_of(self, unit: int) -> int:
        """Return the pipeline stage that holds the unit with this index."""
        if self.stages is None:
            return 0
        return sum(cut <= unit for cut in self.stages.cuts)

    def stage_units(self, stage: int) -> range:
        """Return the indices of the units that a stage holds."""
        cuts = self.stages.cuts if self.stages else ()
        bounds = (0, *cuts, len(self.units))
        return range(bounds[stage], bounds[stage + 1])

    def describe(self) -> str:
        """Say the plan in one line, as tables and logs print it."""
        words = [self.backend]
        if self.zero_stage:
            words.append(f"ZeRO-{self.zero_stage}")
        if self.mesh.shard > 1 and not self.zero_stage:
            words.append(_reshard(self.fsdp2.reshard_after_forward))
        if self.stages and self.stages.schedule != self.backend:
            words.append(self.stages.schedule)
        words.append(f"[{self.mesh}]")
        if self.devices_per_process > 1:
            words.append(f"on {self.devices_per_process} devices")
        words.append(f"micro-batch {self.micro_batch} x {self.accumulation}")
        for policy, verb in (("full", "recompute"), ("selective", "selective")):
            count = self.recompute.count(policy)
            if count:
                share = "all" if count == len(self.recompute) else f"{count} units"
                words.append(f"{verb} {share}")
        words.append(self.precision)
        words += [
            f"{kind} on {tier}"
            for kind in ("parameters", "optimizer", "activations")
            if (tier := getattr(self.offload, kind)) != "device"
        ]
        if self.compile:
            words.append("compiled")
        return " ".join(words)


def _reshard(policy: bool | int) -> str:
    if isinstance(policy, bool):
        return "reshard" if policy else "no reshard"
    return f"reshard to {policy}"


def _violations(plan: Plan):
    for name in ("micro_batch", "accumulation", "devices_per_process"):
        size = getattr(plan, name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            yield Violation(
                field=name, got=size, rule="it must be a whole number of at least 1"
            )
    yield from one_of("precision", plan.precision, Precision)
    if plan.zero_stage not in (0, 1, 2, 3):
        yield Violation(
            field="zero_stage", got=plan.zero_stage, rule="it must be 0, 1, 2 or 3"
        )
    unknown = [policy for policy in plan.recompute if policy not in RECOMPUTE_POLICIES]
    if unknown:
        yield Violation(
            field="recompute",
            got=unknown[0],
            rule=f"a policy must be one of {', '.join(RECOMPUTE_POLICIES)}",
        )
    if plan.compile and "selective" in plan.recompute:
        yield Violation(
            field="recompute",
            got="selective",
            rule="compiled units show no operators, so none could be kept",
            cure="use full or none with compile, or do not compile",
        )
    if plan.recompute and len(plan.recompute) != len(plan.units):
        yield Violation(
            field="recompute",
            got=len(plan.recompute),
            rule=f"it needs one policy for each of the {len(plan.units)} units",
            cure="leave it empty to recompute nothing",
        )
    for block in (
        plan.offload,
        plan.ddp,
        plan.fsdp2,
        plan.deepspeed,
        plan.fairscale,
        plan.horovod,
    ):
        yield from block.violations()
    yield from _stage_violations(plan)


def _stage_violations(plan: Plan):
    count = plan.mesh.pipeline
    if plan.stages is None:
        if count > 1:
            yield Violation(
                field="stages",
                got=None,
                rule=f"a mesh with {count} pipeline stages needs a schedule and cuts",
                cure="set stages=Stages(schedule='1f1b', cuts=...)",
            )
        return
    cuts, stages = plan.stages.cuts, plan.num_stages
    if plan.stages.schedule in SCHEDULES:
        placement = SCHEDULES.get(plan.stages.schedule).placement
        # A stage is on a device, whether or not each has a process of its own.
        refusal = count_refusal(count * plan.devices_per_process, stages, placement)
        if refusal:
            yield Violation(
                field="stages.cuts",
                got=cuts,
                rule=f"{len(cuts)} cuts make {stages} stages, and of schedule "
                f"{plan.stages.schedule!r} {refusal}",
            )
    if stages > len(plan.units):
        yield Violation(
            field="stages.cuts",
            got=cuts,
            rule=f"there cannot be more stages than units, and the plan names "
            f"{len(plan.units)} units",
            cure=f"use at most {max(len(plan.units), 1)} stages",
        )
    bounds = (0, *cuts, len(plan.units))
    if any(low >= high for low, high in pairwise(bounds)):
        yield Violation(
            field="stages.cuts",
            got=cuts,
            rule=f"cuts must rise and lie between 1 and {len(plan.units) - 1}, "
            "so that every stage holds a unit",
        )
