"""What `fully_shard` refuses in a plan, for a whole model or for a stage. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.backends.backend import divisors
from bigmodel.errors import Violation
from bigmodel.plans import Plan


def sharding_violations(plan: Plan) -> Iterator[Violation]:
    """Yield resharding to a group that is none, and a reduction that only rounds."""
    size, ranks = plan.fsdp2.reshard_after_forward, plan.mesh.shard
    if not isinstance(size, bool) and size not in divisors(ranks)[1:-1]:
        fitting = ", ".join(map(str, divisors(ranks)[1:-1]))
        yield Violation(
            field="fsdp2.reshard_after_forward",
            got=size,
            rule=f"a smaller group divides the {ranks} ranks of axis shard and is "
            "neither 1 nor all of them",
            cure=f"use {fitting}" if fitting else "use True (all ranks) or False",
        )
    if plan.fsdp2.reduce_dtype == "bfloat16" and plan.precision != "bf16":
        yield Violation(
            field="fsdp2.reduce_dtype",
            got="bfloat16",
            rule=f"it is for weights in bfloat16, and precision is {plan.precision}",
            cure="leave it at float32",
        )


def stage_violations(plan: Plan) -> Iterator[Violation]:
    """Yield what has no effect on the shards of a stage, beside the rules above."""
    if plan.mesh.shard > 1:
        yield from sharding_violations(plan)
    for name in ("postpone_reduction", "ignored", "methods"):
        value = getattr(plan.fsdp2, name)
        if value:
            yield Violation(
                field=f"fsdp2.{name}",
                got=value,
                rule="it would have no effect under backend 'pipeline', whose stages "
                "always reduce after the last micro-batch and shard all they hold",
                cure="leave it at its default, or use backend 'fsdp2'",
            )
