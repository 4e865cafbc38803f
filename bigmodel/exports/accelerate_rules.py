"""What accelerate can be told of a plan, and what not, with the reason.

It is told in three ways. An object, `bigmodel.accelerator(plan)`, can carry all that
accelerate has an argument for. The file of `accelerate launch` and the arguments of
transformers' Trainer have names for less. Source: accelerate 1.15, `accelerator.py`,
`utils/dataclasses.py`, `commands/config/config_args.py`; transformers 5.24,
`training_args.py`, `trainer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.errors import Violation
from bigmodel.plans import Plan

Way = Literal["object", "file", "trainer"]
"""How accelerate is told."""

KINDS = {"ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}
"""Backends that accelerate has too."""

MIXED_PRECISION = {
    ("ddp", "fp32"): "no",
    ("ddp", "autocast"): "bf16",
    ("ddp", "autocast-fp16"): "fp16",
    ("fsdp2", "fp32"): "no",
    ("fsdp2", "bf16"): "bf16",
    ("fsdp2", "fp16"): "fp16",
    ("deepspeed", "fp32"): "no",
    ("deepspeed", "bf16"): "bf16",
    ("deepspeed", "fp16"): "fp16",
}
"""From backend and `Plan.precision` to accelerate's `mixed_precision`."""

_SAID: dict[tuple[str, Way], frozenset[str]] = {
    ("ddp", "object"): frozenset(
        {
            "bucket_megabytes",
            "gradient_views",
            "static_graph",
            "find_unused",
            "hook",
            "powersgd_rank",
            "powersgd_start",
        }
    ),
    # Plain DDP, as the tool makes it. Where gradients live does not change training,
    # so a file may leave it out, and says so in a note.
    ("ddp", "file"): frozenset({"gradient_views"}),
    ("ddp", "trainer"): frozenset(
        {"bucket_megabytes", "gradient_views", "static_graph", "find_unused"}
    ),
    ("fsdp2", "object"): frozenset(
        {"reshard_after_forward", "reduce_dtype", "postpone_reduction"}
    ),
    # Both are as the tool does it where they are not the default; notes say when it
    # does not do as the default says.
    ("fsdp2", "file"): frozenset(
        {"reshard_after_forward", "reduce_dtype", "postpone_reduction"}
    ),
    ("fsdp2", "trainer"): frozenset(
        {"reshard_after_forward", "reduce_dtype", "postpone_reduction"}
    ),
}
"""Fields of a backend's own block of options that can be said. All of DeepSpeed's can,
in its configuration."""

_OBJECT = "use bigmodel.accelerator(plan) in the script"


def accelerate_violations(plan: Plan, way: Way) -> Iterator[Violation]:
    """Yield everything in a plan that accelerate cannot be told in this way."""
    if plan.backend == "pipeline":
        yield Violation(
            field="backend",
            got="pipeline",
            rule="accelerate does not train pipelines: a schedule owns forward and "
            "backward, which a loop of one's own calls by itself",
            cure="train with engine = bigmodel.prepare(...) and engine.step(batch), "
            "or plan with backends=['ddp', 'fsdp2', 'deepspeed']",
        )
        return
    if plan.backend not in KINDS:
        yield Violation(
            field="backend",
            got=plan.backend,
            rule=f"accelerate has {', '.join(KINDS)}",
            cure="train with bigmodel.prepare, or plan for one of these",
        )
        return
    yield from refusals(BACKENDS.get(plan.backend), plan)
    if plan.backend == "ddp" and plan.zero_stage:
        yield Violation(
            field="zero_stage",
            got=plan.zero_stage,
            rule="accelerate has no ZeroRedundancyOptimizer",
            cure="use backend 'deepspeed' with zero_stage=1",
        )
    yield from _precision(plan)
    if plan.compile:
        yield Violation(
            field="compile",
            got=True,
            rule="accelerate compiles the whole model or the blocks it finds, not the "
            "plan's units",
            cure="compile in the script, or train with bigmodel.prepare",
        )
    if plan.backend != "deepspeed":
        yield from _options(plan, way)
    yield from _offload(plan)
    yield from _recompute(plan, way)
    if way == "trainer" and plan.backend == "fsdp2" and plan.mesh.replicate > 1:
        yield Violation(
            field="mesh.replicate",
            got=plan.mesh.replicate,
            rule="Trainer takes replicas of shards as an object, not as data",
            cure="add parallelism_config=accelerate.ParallelismConfig("
            f"dp_replicate_size={plan.mesh.replicate}, "
            f"dp_shard_size={plan.mesh.shard}) in the script, or shard over all ranks",
        )


def _precision(plan: Plan) -> Iterator[Violation]:
    if (plan.backend, plan.precision) in MIXED_PRECISION:
        return
    if plan.backend == "ddp":
        rule = "accelerate keeps no fp32 copies of half-precision weights under DDP"
        cure = "use autocast, which keeps fp32 weights, or backend 'fsdp2'"
    elif plan.backend == "fsdp2":
        rule = (
            "accelerate runs FSDP2 models without autocast, in the type of the shards"
        )
        cure = "use bf16: shards and optimizer states stay fp32"
    else:
        rule = (
            "accelerate leaves precision to DeepSpeed, whose autocast sends gradients "
        )
        rule += "in half precision"
        cure = "use bf16, whose masters are fp32"
    yield Violation(field="precision", got=plan.precision, rule=rule, cure=cure)


def _options(plan: Plan, way: Way) -> Iterator[Violation]:
    """Yield the options that the tool has no word for and that are not its default."""
    block: Any = getattr(plan, plan.backend)
    default = type(block)()
    said = _SAID[plan.backend, way]
    for entry in fields(block):
        value = getattr(block, entry.name)
        if entry.name in said or value == getattr(default, entry.name):
            continue
        yield Violation(
            field=f"{plan.backend}.{entry.name}",
            got=value,
            rule=f"{_TOOLS[way]} cannot be told it",
            cure="leave it at its default, or train with bigmodel.prepare"
            if entry.name not in _SAID[plan.backend, "object"]
            else f"leave it at its default, or {_OBJECT}",
        )
    reshard = plan.fsdp2.reshard_after_forward
    if plan.backend == "fsdp2" and not isinstance(reshard, bool):
        yield Violation(
            field="fsdp2.reshard_after_forward",
            got=reshard,
            rule="accelerate takes True or False",
            cure="use one of them, or train with bigmodel.prepare",
        )
    megabytes = plan.ddp.bucket_megabytes
    if plan.backend == "ddp" and way == "trainer" and megabytes != int(megabytes):
        yield Violation(
            field="ddp.bucket_megabytes",
            got=megabytes,
            rule="Trainer takes whole MiB",
            cure=f"use {max(1, round(megabytes))}",
        )


_TOOLS: dict[Way, str] = {
    "object": "accelerate",
    "file": "the file of accelerate launch",
    "trainer": "transformers' Trainer",
}


def _offload(plan: Plan) -> Iterator[Violation]:
    # DeepSpeed's configuration says all of it; DDP obeys none of it.
    if plan.backend != "fsdp2":
        return
    tiers = (plan.offload.parameters, plan.offload.optimizer)
    if tiers not in {("device", "device"), ("cpu", "cpu")}:
        yield Violation(
            field="offload",
            got=f"parameters on {tiers[0]}, optimizer on {tiers[1]}",
            rule="accelerate moves both to the CPU or none",
            cure="offload parameters and optimizer together",
        )
    if plan.offload.activations != "device":
        yield Violation(
            field="offload.activations",
            got=plan.offload.activations,
            rule="accelerate's recomputation is not the plan's",
            cure="keep them on the device, or train with bigmodel.prepare",
        )


def _recompute(plan: Plan, way: Way) -> Iterator[Violation]:
    full = plan.recompute.count("full")
    if not plan.recomputed or way == "object":
        return
    if way == "file":
        yield Violation(
            field="recompute",
            got=f"{plan.recomputed} units",
            rule="the file knows recomputation only for FSDP, and there without the "
            "random numbers of the first forward, which dropout needs again",
            cure=_OBJECT,
        )
    elif full < len(plan.recompute):
        yield Violation(
            field="recompute",
            got=f"{full} of {len(plan.recompute)} units",
            rule="Trainer recomputes all blocks in full, or none",
            cure=f"recompute all or none, or {_OBJECT}",
        )
