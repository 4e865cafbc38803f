"""What may stand where a model is expected."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

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
        model = _made(source, seed)
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
    return _in_fp32(model).cpu()


def as_empty_model(source: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the model without memory for its tensors, where it can be made so.

    A function is run on torch's `meta` device, where tensors have shapes and no values.
    A function that reads values, loads weights, or keeps tensors that are no parameters
    or buffers cannot be run there, and is run as it is; a module is taken as it is.
    """
    if isinstance(source, nn.Module):
        return as_model(source, seed)
    try:
        with torch.device("meta"):
            model = _made(source, seed)
    except Exception:
        # Whatever it was: on the CPU the user sees it as it is, or it works.
        return as_model(source, seed)
    if not isinstance(model, nn.Module) or _hides_tensors(model):
        return as_model(source, seed)
    return _in_fp32(model)


def _made(source: Callable[[], nn.Module], seed: int) -> nn.Module:
    if not callable(source):
        raise UsageError(
            f"a {type(source).__name__} is no model; give a torch.nn.Module, or a "
            "function that makes one"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return source()


def _in_fp32(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        # Weights that were read in half precision: plans count masters in fp32.
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    return model


def _hides_tensors(model: nn.Module) -> bool:
    """Say whether a module has tensors on `meta` that nobody would fill."""
    known = ("_parameters", "_buffers", "_modules")
    return any(
        isinstance(leaf, torch.Tensor) and leaf.is_meta
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in known
        for leaf in tree_leaves(value)
    )


@torch.no_grad()
def copy_from_first_rank(model: nn.Module, device: torch.device) -> None:
    """Give every rank the weights and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        # By way of the device: a group that the user made may have no CPU backend.
        moved = tensor.detach().to(device)
        dist.broadcast(moved, 0)
        tensor.copy_(moved)
