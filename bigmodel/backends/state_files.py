"""Weights and optimizer states of one plan in files, by torch's distributed checkpoint.

Plain tensors (DDP) are written once, shards (FSDP2) by the ranks that hold them, stages
of a pipeline each under the names of the whole model. The flat form of the optimizer
state is used: in the other form all stages would write their parameter groups under one
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bigmodel.backends.updating import Updater

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_state(folder: str, model: nn.Module, updater: Updater) -> None:
    """Write this rank's part of the model's tensors, masters and optimizer states.

    Args:
        folder: Exists; what it held is replaced.
        model: The model, or the stage.
        updater: Holds the optimizer, masters and loss scale.
    """
    writer = FileSystemWriter(folder, overwrite=True)
    save(_state(model, updater), storage_writer=writer)


def load_state(folder: str, model: nn.Module, updater: Updater) -> None:
    """Read what `save_state` wrote for an equal model under the same plan."""
    # Reading fills tensors in place, so a state of the right shape comes first; torch
    # makes the optimizer's by a step with learning rate 0.
    state = _state(model, updater)
    load(state, checkpoint_id=folder)
    _fill(model, state["model"])
    owner = model
    if updater.masters is not None:
        owner = updater.masters.module
        _fill(owner, state["masters"])
    if updater.local_optimizer is not None:
        set_optimizer_state_dict(
            owner, updater.local_optimizer, state["optimizer"], options=_FLAT
        )
    updater.scale.restore(state["loss_scale"])


def _state(model: nn.Module, updater: Updater) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": _unique(model),
        "loss_scale": updater.scale.state(),
    }
    owner = model
    if updater.masters is not None:
        owner = updater.masters.module
        state["masters"] = _unique(owner)
    if updater.local_optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(
            owner, updater.local_optimizer, options=_FLAT
        )
    return state


def _unique(model: nn.Module) -> dict[str, Tensor]:
    # Tied weights once, under their first name; persistent buffers under theirs.
    kept = {name for name, _ in model.named_parameters()}
    kept |= {name for name, _ in model.named_buffers()}
    return {
        name: value
        for name, value in model.state_dict().items()
        if name in kept and isinstance(value, Tensor)
    }


def _fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    model.load_state_dict(dict(values), strict=False)
