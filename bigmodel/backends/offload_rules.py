"""What backends refuse that keep only activations in the CPU's memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.errors import Violation
from bigmodel.plans import Plan


def activation_offload_violations(plan: Plan) -> Iterator[Violation]:
    """Yield tiers of other states, and offloading where nothing is recomputed."""
    for name in ("parameters", "optimizer"):
        tier = getattr(plan.offload, name)
        if tier != "device":
            yield Violation(
                field=f"offload.{name}",
                got=tier,
                rule=f"backend {plan.backend!r} offloads activations only",
                cure="use backend 'fsdp2' or 'deepspeed'",
            )
    yield from unused_offload_violations(plan)


def unused_offload_violations(plan: Plan) -> Iterator[Violation]:
    """Yield offloading of activations where no unit is recomputed."""
    if plan.offload.activations != "device" and not plan.recomputed:
        yield Violation(
            field="offload.activations",
            got=plan.offload.activations,
            rule="only recomputed units keep their inputs elsewhere, and none is",
            cure="recompute units, or leave it at 'device'",
        )
