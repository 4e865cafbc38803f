"""What FSDP2 cannot offload, and what it cannot leave out of sharding."""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.backends.shard_groups import full_name, is_ignored
from bigmodel.backends.stepping import optimizer_state_bytes
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Plan
from bigmodel.units import format_bytes


def offload_violations(
    plan: Plan, model: ModelSpec | None, cluster: Cluster | None
) -> Iterator[Violation]:
    """Yield what `CPUOffloadPolicy` does not do, and a host without enough memory."""
    offload = plan.offload
    if offload.activations != "device":
        yield Violation(
            field="offload.activations",
            got=offload.activations,
            rule="backend 'fsdp2' keeps activations on the device",
            cure="recompute units instead",
        )
    tiers = (offload.parameters, offload.optimizer)
    if tiers == ("device", "device"):
        return
    if tiers != ("cpu", "cpu"):
        yield Violation(
            field="offload",
            got=f"parameters on {tiers[0]}, optimizer on {tiers[1]}",
            rule="FSDP2 offloads weights, gradients and optimizer states together, to "
            "the CPU's memory",
            cure="set both parameters='cpu' and optimizer='cpu', or use backend "
            "'deepspeed'",
        )
        return
    if plan.fsdp2.ignored:
        yield Violation(
            field="fsdp2.ignored",
            got=plan.fsdp2.ignored,
            rule="FSDP2 offloads shards only, and an optimizer would hold parameters "
            "on two devices",
            cure="leave one of fsdp2.ignored and offload out",
        )
    if model is None or cluster is None or not cluster.node.host_memory:
        return
    shards = plan.mesh.shard
    # Weights and gradients in fp32, and the states.
    rank = 4 * (model.elements + model.trainable_elements) / shards
    rank += optimizer_state_bytes(plan, model.trainable_elements / shards)
    needed = int(rank * cluster.node.count)
    if cluster.device.kind == "cuda" and needed > cluster.node.host_memory:
        yield Violation(
            field="offload",
            got="parameters and optimizer on cpu",
            rule=f"{cluster.node.count} ranks keep {format_bytes(needed)} in a host "
            f"that has {format_bytes(cluster.node.host_memory)}",
            cure="shard over more ranks, or do not offload",
        )


def ignored_violations(plan: Plan, model: ModelSpec | None) -> Iterator[Violation]:
    """Yield modules that do not exist, are tied to others, or would not be cast."""
    paths = plan.fsdp2.ignored
    if not paths:
        return
    if plan.number_format.masters:
        yield Violation(
            field="fsdp2.ignored",
            got=paths,
            rule=f"FSDP2 casts only what it shards; fp32 weights of ignored modules "
            f"cannot be multiplied with {plan.number_format.weights} activations",
            cure="use precision autocast",
        )
    if model is None:
        return
    names = [
        (full_name(placed, param.name), param)
        for placed in model.sequence
        for param in placed.unit.params
        if not param.buffer
    ]
    for path in paths:
        if not any(is_ignored(name, (path,)) for name, _ in names):
            yield Violation(
                field="fsdp2.ignored",
                got=path,
                rule=f"{model.name} has no parameters there",
            )
    for name, param in names:
        tied = param.tied_to
        if tied is not None and is_ignored(name, paths) != is_ignored(tied, paths):
            yield Violation(
                field="fsdp2.ignored",
                got=name,
                rule=f"it is tied to {tied!r}, and one of them is sharded",
                cure="ignore both modules, or neither",
            )
