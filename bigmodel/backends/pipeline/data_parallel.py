"""Data parallelism inside a stage: DDP, FSDP2 or both (HSDP)."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bigmodel.backends.pipeline.stage import Stage
from bigmodel.plans import Plan


def spread(
    stage: Stage, blocks: dict[str, nn.Module], plan: Plan, mesh: DeviceMesh
) -> nn.Module:
    """Return what the schedule must run: the stage, sharded or wrapped in DDP.

    torch's pipeline stage knows both kinds and reduces gradients once, after the last
    micro-batch.

    Args:
        stage: The stage.
        blocks: Its blocks, the units of sharding.
        plan: The plan.
        mesh: The device mesh with axes `pipeline`, `replicate` and `shard`.
    """
    if plan.mesh.shard > 1:
        return _shard(stage, blocks, plan, mesh)
    trained = any(parameter.requires_grad for parameter in stage.parameters())
    if plan.mesh.replicate > 1 and trained:
        return DistributedDataParallel(
            stage,
            process_group=mesh.get_group("replicate"),
            # A float is what torch multiplies; its annotation says int.
            bucket_cap_mb=plan.buckets.ddp_megabytes,  # pyright: ignore[reportArgumentType]
            gradient_as_bucket_view=plan.buckets.ddp_gradient_views,
        )
    return stage


def reshard(wrapped: nn.Module) -> None:
    """Free weights that FSDP2 left gathered; nothing for other modules."""
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _shard(
    stage: Stage, blocks: dict[str, nn.Module], plan: Plan, mesh: DeviceMesh
) -> nn.Module:
    axes = ("replicate", "shard") if plan.mesh.replicate > 1 else ("shard",)
    policy = MixedPrecisionPolicy()
    if plan.precision == "bf16":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for module in (*_groups(stage, blocks), stage):
        fully_shard(
            module,
            mesh=mesh[axes],
            reshard_after_forward=plan.reshard_after_forward,
            mp_policy=policy,
        )
    return stage


def _groups(stage: Stage, blocks: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the blocks that can be a group of their own.

    A block without parameters has nothing to shard. One that shares a parameter with
    another part of the stage stays in the root group, where both are gathered together.
    """
    names = dict(stage.named_parameters(remove_duplicate=False))
    uses = Counter(names.values())
    groups: list[nn.Module] = []
    for block in blocks.values():
        own = Counter(dict(block.named_parameters(remove_duplicate=False)).values())
        if own and all(uses[parameter] == count for parameter, count in own.items()):
            groups.append(block)
    return groups
