"""Putting the modules of a model on the devices of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bigmodel.backends.batch import to_device
from bigmodel.plans import Plan


def device_indices(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Return the index of the device of every module that is placed, by path.

    Modules around the units go with their neighbours: with the first stage what is
    defined before all units, with the last one what is defined after them, else with
    the unit that follows. What is defined after them and is tied to a weight of an
    earlier device pulls all that is defined after them there. Modules that hold only
    buffers (rotary embeddings) stay on the first device.

    Args:
        model: The whole model.
        plan: With stages.
    """
    numbers = {path: index for index, path in enumerate(plan.units)}
    parts = list(_parts(model, "", frozenset(plan.units)))
    held = [at for at, (path, _) in enumerate(parts) if path in numbers]
    indices: dict[str, int] = {}
    owners: dict[nn.Parameter, int] = {}
    for at, (path, module) in enumerate(parts[: held[-1] + 1]):
        following = next(unit for unit in held if unit >= at)
        stage = plan.stage_of(numbers[parts[following][0]])
        indices[path] = 0 if at < held[0] else stage
        owners.update(dict.fromkeys(module.parameters(), indices[path]))
    after = parts[held[-1] + 1 :]
    end = min(
        [owners[p] for _, module in after for p in module.parameters() if p in owners],
        default=plan.num_stages - 1,
    )
    indices.update({path: end for path, _ in after})
    for path, module in parts:
        if path not in numbers and next(module.parameters(), None) is None:
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


def _parts(
    module: nn.Module, path: str, units: frozenset[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield units, and the largest modules with tensors that hold no unit."""
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        holds = any(unit.startswith(f"{at}.") for unit in units)
        if holds and at not in units:
            yield from _parts(child, at, units)
        elif at in units or _has_tensors(child):
            yield at, child


def _has_tensors(module: nn.Module) -> bool:
    found = next(module.parameters(), None)
    return found is not None or next(module.buffers(), None) is not None
