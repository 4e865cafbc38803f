"""Applying `fully_shard` to a model or a pipeline stage as a plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bigmodel.plans import Plan


def shard(
    module: nn.Module, blocks: Mapping[str, nn.Module], plan: Plan, mesh: DeviceMesh
) -> FSDPModule:
    """Shard every block as a group of its own, and the rest as the root group.

    The root's weights stay gathered from forward to backward, which is torch's default:
    its backward begins where its forward ends.

    Args:
        module: The model or the stage.
        blocks: Its blocks.
        plan: Says precision and whether to reshard after forward.
        mesh: One axis to shard, or two to replicate and to shard.
    """
    policy = MixedPrecisionPolicy()
    form = plan.number_format
    if form.masters:
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, form.weights), reduce_dtype=torch.float32
        )
    for block in _groups(module, blocks):
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=plan.fsdp2.reshard_after_forward,
        )
    return fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _groups(module: nn.Module, blocks: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the blocks that can be a group of their own.

    A block without parameters has nothing to shard. One that shares a parameter with
    another part of the model stays in the root group, where both are gathered together.
    """
    uses = _uses(module)
    return [
        block
        for block in blocks.values()
        if block is not module
        and (own := _uses(block))
        and all(uses[parameter] == count for parameter, count in own.items())
    ]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Count under how many names a module holds each parameter."""
    return Counter(dict(module.named_parameters(remove_duplicate=False)).values())
