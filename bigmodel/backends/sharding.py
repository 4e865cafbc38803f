"""Applying `fully_shard` to a model or a pipeline stage as a plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from bigmodel.plans import Plan


def shard(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    plan: Plan,
    mesh: DeviceMesh,
    *,
    ignored: Sequence[nn.Parameter] = (),
    fill: Callable[[nn.Module], None] = lambda module: None,
) -> FSDPModule:
    """Shard every block as a group of its own, and the rest as the root group.

    The root's weights stay gathered from forward to backward, which is torch's default:
    its backward begins where its forward ends.

    Args:
        module: The model or the stage.
        blocks: Its blocks.
        plan: Says precision, whether to reshard after forward, and the rest.
        mesh: One axis to shard, or two to replicate and to shard.
        ignored: Parameters to leave whole.
        fill: Called with every module just before it is sharded, to put its values on
            the device.
    """
    left_out = set(ignored)
    options = plan.fsdp2
    policy = MixedPrecisionPolicy()
    form = plan.number_format
    if form.masters:
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, form.weights),
            reduce_dtype=getattr(torch, options.reduce_dtype),
        )
    offload = OffloadPolicy()
    if plan.offload.parameters == "cpu":
        # Without a GPU there is no memory to pin.
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    groups: list[FSDPModule] = []
    for block in _groups(module, blocks, left_out):
        fill(block)
        groups.append(
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=options.reshard_after_forward,
                ignored_params=left_out,
            )
        )
    fill(module)
    root = fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=False,
        ignored_params=left_out,
    )
    if options.prefetch > 1:
        _prefetch([root, *groups], options.prefetch)
    return root


def _prefetch(groups: Sequence[FSDPModule], depth: int) -> None:
    """Let every group, root first, gather the next ones in both directions."""
    for index, group in enumerate(groups):
        group.set_modules_to_forward_prefetch(
            list(groups[index + 1 : index + 1 + depth])
        )
        # The root's backward comes first and its weights are there: it fetches the
        # last blocks; the first block has none before it.
        last = index or len(groups)
        before = list(reversed(groups[max(1, last - depth) : last]))
        if before:
            group.set_modules_to_backward_prefetch(before)


def _groups(
    module: nn.Module, blocks: Mapping[str, nn.Module], ignored: set[nn.Parameter]
) -> list[nn.Module]:
    """Return the blocks that can be a group of their own.

    A block without parameters has nothing to shard. One that shares a parameter with
    another part of the model stays in the root group, where both are gathered together.
    """
    uses = _uses(module)
    return [
        block
        for block in blocks.values()
        if block is not module
        and not ignored.issuperset(own := _uses(block))
        and all(uses[parameter] == count for parameter, count in own.items())
    ]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Count under how many names a module holds each parameter."""
    return Counter(dict(module.named_parameters(remove_duplicate=False)).values())
