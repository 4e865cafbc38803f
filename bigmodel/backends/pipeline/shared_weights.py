"""Weights that several stages hold: tied embedding and head.

Each stage has its own copy and computes its own part of the gradient. The parts are
summed between the stages before the update, so the copies take the same step and stay
equal; the norm of the gradients counts them once.

    stage 0   embedding ── gradient ─┐
    stage 1                          ├ sum, on both
    stage 2   head ─────── gradient ─┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigmodel.plans import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """One weight that this stage and others hold."""

    name: str
    """Its name in this stage."""
    group: dist.ProcessGroup
    """The ranks that hold it and read the same share of the data."""
    is_owner: bool
    """Whether this is the first stage that holds it, the one that counts it."""


def find_shared(
    model: nn.Module, tied: tuple[tuple[str, ...], ...], mesh: Mesh
) -> list[SharedWeight]:
    """Return the weights of this stage that other stages hold too.

    Collective over all ranks of the job.

    Args:
        model: The model, cut down to this stage.
        tied: What `tied_names` found in the whole model.
        mesh: The plan's mesh.
    """
    left = dict(model.named_parameters(remove_duplicate=False))
    mine = [[name for name in names if name in left] for names in tied]
    everyone: list[list[list[str]]] = [[] for _ in range(mesh.world)]
    dist.all_gather_object(everyone, mine)
    rank = dist.get_rank()
    found: list[SharedWeight] = []
    for index, here in enumerate(mine):
        stages = [
            stage
            for stage in range(mesh.pipeline)
            if everyone[mesh.stage_ranks(stage)[0]][index]
        ]
        if len(stages) < 2:
            continue
        # Every rank must take part in making every group, in the same order.
        for share in range(mesh.data_parallel):
            ranks = [mesh.stage_ranks(stage)[share] for stage in stages]
            group: Any = dist.new_group(ranks)
            if rank in ranks and left[here[0]].requires_grad:
                found.append(
                    SharedWeight(name=here[0], group=group, is_owner=rank == ranks[0])
                )
    return found


@torch.no_grad()
def sum_gradients(
    params: Mapping[str, nn.Parameter], shared: list[SharedWeight]
) -> None:
    """Add up the gradients of shared weights over the stages that hold them.

    Args:
        params: The parameters that take the step, by name.
        shared: What `find_shared` returned.
    """
    for weight in shared:
        parameter = params[weight.name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(_local(parameter.grad), group=weight.group)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
