"""Data parallelism inside a stage: DDP, FSDP2 or both (HSDP)."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from bigmodel.backends.ddp_wrapping import wrap
from bigmodel.backends.fp32_sums import Fp32Sums
from bigmodel.backends.pipeline.stage import Stage
from bigmodel.backends.sharding import shard
from bigmodel.plans import Plan


def spread(
    stage: Stage,
    blocks: dict[str, nn.Module],
    plan: Plan,
    mesh: DeviceMesh,
    sums: Fp32Sums | None,
) -> nn.Module:
    """Return what the schedule must run: the stage, sharded or wrapped in DDP.

    torch's pipeline stage knows both kinds and reduces gradients once, after the last
    micro-batch.

    Args:
        stage: The stage.
        blocks: Its blocks, the units of sharding.
        plan: The plan.
        mesh: The device mesh with axes `pipeline`, `replicate` and `shard`.
        sums: Where gradients add up during backward; None: with their parameters.
    """
    if plan.mesh.shard > 1:
        axes = ("replicate", "shard") if plan.mesh.replicate > 1 else ("shard",)
        shard(stage, blocks, plan, mesh[axes])
        return stage
    trained = any(parameter.requires_grad for parameter in stage.parameters())
    if plan.mesh.replicate > 1 and trained:
        wrapped, _ = wrap(stage, plan.ddp, mesh.get_group("replicate"), sums)
        return wrapped
    return stage


def reshard(wrapped: nn.Module) -> None:
    """Free weights that FSDP2 left gathered; nothing for other modules."""
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
