"""The norm of all gradients, over the stages and shards that hold them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bigmodel.backends.pipeline.relay import Line


@torch.no_grad()
def clip_gradients(
    line: Line,
    params: Mapping[str, nn.Parameter],
    counted_elsewhere: Collection[str],
    max_norm: float,
) -> Tensor:
    """Scale the gradients of all stages to a common norm of at most `max_norm`.

    Args:
        line: The place of this rank in its pipeline.
        params: The trained parameters of this stage, by name.
        counted_elsewhere: Names of those whose gradient another stage counts.
        max_norm: The largest norm.

    Returns:
        The norm before.
    """
    gradients = [
        parameter.grad
        for name, parameter in params.items()
        if parameter.grad is not None and name not in counted_elsewhere
    ]
    norm = get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    square = norm.to(line.device, torch.float32).square()
    dist.all_reduce(square, group=line.group)
    total = square.sqrt()
    clip_grads_with_norm_(params.values(), max_norm, total)
    return total
