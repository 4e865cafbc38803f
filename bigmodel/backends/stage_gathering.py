"""The whole model's weights on rank 0, from the stages that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gather_weights(
    group: dist.ProcessGroup,
    device: torch.device,
    weights: Mapping[str, Tensor],
    order: Sequence[str],
) -> dict[str, Tensor]:
    """Bring the weights of all stages to the first rank, one tensor at a time.

    Collective over all ranks of the job; the ranks of other pipelines than the first
    only help to gather shards.

    Args:
        group: The ranks of this rank's pipeline, first stage first.
        device: Where this rank computes.
        weights: The weights of this rank by their names in the whole model.
        order: All names, in the order of the whole model.

    Returns:
        The weights on the CPU; empty on all ranks but the first.
    """
    in_first_pipeline = dist.get_process_group_ranks(group)[0] == 0
    place, size = dist.get_rank(group), dist.get_world_size(group)
    layout = [(name, value.shape, value.dtype) for name, value in weights.items()]
    layouts: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]] * size
    dist.all_gather_object(layouts, layout, group=group)
    whole: dict[str, Tensor] = {}
    for value, (name, _, _) in zip(weights.values(), layout, strict=True):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if not in_first_pipeline:
            continue
        if place == 0:
            whole[name] = full.detach().to("cpu", copy=True)
        else:
            dist.send(full.detach().contiguous(), group=group, group_dst=0)
    if not (place == 0 and in_first_pipeline):
        return {}
    for rank in range(1, size):
        for name, shape, dtype in layouts[rank]:
            received = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(received, group=group, group_src=rank)
            # What several stages hold (a buffer, a tied weight) is equal in all.
            whole.setdefault(name, received.cpu())
    return {name: whole[name] for name in order if name in whole}
