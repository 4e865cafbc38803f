"""A model for every stage of a rank, over the same weights, and all of them as one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from torch import Tensor, nn

from bigmodel.backends.engine import Job


def job_for_each(job: Job, count: int) -> list[Job]:
    """Return as many jobs, each with a copy of the model that shares its tensors.

    Cutting a copy down to its stage leaves the others whole; what no copy holds any
    more is freed with the last of them.
    """
    if count == 1:
        return [job]
    tensors = chain(job.model.parameters(), job.model.buffers())
    shared = {id(tensor): tensor for tensor in tensors}
    return [
        replace(job, model=copy.deepcopy(job.model, dict(shared))) for _ in range(count)
    ]


def as_one(models: Iterable[nn.Module]) -> nn.Module:
    """Return a module without a forward that holds what all models hold.

    Tensors have the names they have in the whole model; those that several stages hold
    are there once.
    """
    several = list(models)
    if len(several) == 1:
        return several[0]
    root = nn.Module()
    for model in several:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            _register(root, name, parameter)
        for path, module in model.named_modules():
            for leaf, buffer in module.named_buffers(recurse=False):
                kept = leaf not in module._non_persistent_buffers_set
                name = f"{path}.{leaf}" if path else leaf
                _register(root, name, buffer, persistent=kept)
    return root


def _register(
    root: nn.Module, name: str, tensor: Tensor, *, persistent: bool = True
) -> None:
    *path, leaf = name.split(".")
    module = root
    for part in path:
        child = module._modules.get(part)
        if child is None:
            child = nn.Module()
            module.add_module(part, child)
        module = child
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor, persistent=persistent)
