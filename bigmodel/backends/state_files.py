"""Weights and optimizer states of one plan in files, by torch's distributed checkpoint.

Plain tensors (DDP) are written once, shards (FSDP2) by the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bigmodel.backends.precision import MasterWeights


def save_state(
    folder: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    masters: MasterWeights | None = None,
) -> None:
    """Write the model's tensors, fp32 masters if any, and the optimizer's states."""
    save(_state(model, optimizer, masters), checkpoint_id=folder)


def load_state(
    folder: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    masters: MasterWeights | None = None,
) -> None:
    """Read what `save_state` wrote for an equal model under the same plan."""
    # Reading fills tensors in place, so a state of the right shape comes first; torch
    # makes the optimizer's by a step with learning rate 0.
    state = _state(model, optimizer, masters)
    load(state, checkpoint_id=folder)
    _fill(model, state["model"])
    owner = model
    if masters is not None:
        owner = masters.module
        _fill(owner, state["masters"])
    set_optimizer_state_dict(owner, optimizer, state["optimizer"])


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, masters: MasterWeights | None
) -> dict[str, Any]:
    owner = model if masters is None else masters.module
    state: dict[str, Any] = {
        "model": _unique(model),
        "optimizer": get_optimizer_state_dict(owner, optimizer),
    }
    if masters is not None:
        state["masters"] = _unique(masters.module)
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
