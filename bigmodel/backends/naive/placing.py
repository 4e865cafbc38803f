"""Putting the modules of a model on the devices of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bigmodel.backends.batch import to_device
from bigmodel.backends.outside_units import stages_of_parts
from bigmodel.plans import Plan


def device_indices(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Return the index of the device of every module that is placed, by path.

    Modules around the units go with their neighbours (`outside_units.py`). What comes
    after the units and is tied to a weight of an earlier device pulls all that comes
    after them there. Modules that hold only buffers (rotary embeddings) stay on the
    first device.

    Args:
        model: The whole model.
        plan: With stages.
    """
    indices = stages_of_parts(model, plan)
    modules = dict(model.named_modules())
    last = max(at for at, path in enumerate(indices) if path in plan.units)
    after = list(indices)[last + 1 :]
    owners = {
        parameter: index
        for path, index in indices.items()
        if path not in after
        for parameter in modules[path].parameters()
    }
    tied = [p for path in after for p in modules[path].parameters() if p in owners]
    end = min((owners[p] for p in tied), default=plan.num_stages - 1)
    indices.update(dict.fromkeys(after, end))
    for path in indices:
        if path not in plan.units and next(modules[path].parameters(), None) is None:
            indices[path] = 0
    return indices


def place(model: nn.Module, plan: Plan, devices: list[torch.device]) -> None:
    """Move every module to its device, and let its inputs follow it.

    Args:
        model: The whole model; what belongs to no module that is placed is put on the
            first device.
        plan: With stages.
        devices: One for every stage.
    """
    model.to(devices[0])
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    for path, index in device_indices(model, plan).items():
        _put(modules[path], devices[index])


def _put(module: nn.Module, device: torch.device) -> None:
    module.to(device)

    def follow(_: nn.Module, positional: Any, named: Any) -> Any:
        return to_device(positional, device), to_device(named, device)

    module.register_forward_pre_hook(follow, with_kwargs=True)
