"""What may stand where a model is expected."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from bigmodel.errors import UsageError


def as_model(source: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the model with trainable weights in fp32, on the CPU.

    Args:
        source: A module, or a function that makes one; the function runs with torch's
            random numbers at `seed`.
        seed: The seed.
    """
    model = source
    if not isinstance(source, nn.Module):
        if not callable(source):
            raise UsageError(
                f"a {type(source).__name__} is no model; give a torch.nn.Module, or a "
                "function that makes one"
            )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = source()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model function returned a {type(model).__name__}; it must return a "
            "torch.nn.Module"
        )
    empty = [name for name, value in model.named_parameters() if value.is_meta]
    if empty:
        raise UsageError(
            f"{len(empty)} parameters have no values (they are on the meta device), "
            f"such as {empty[0]!r}; make the model on the CPU"
        )
    for parameter in model.parameters():
        # Weights that were read in half precision: plans count masters in fp32.
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    return model.cpu()


@torch.no_grad()
def copy_from_first_rank(model: nn.Module, device: torch.device) -> None:
    """Give every rank the weights and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        # By way of the device: a group that the user made may have no CPU backend.
        moved = tensor.detach().to(device)
        dist.broadcast(moved, 0)
        tensor.copy_(moved)
