"""Weights and optimizer states of all stages in files.

The flat form of torch's optimizer state is used: in the other form every stage would
write its own parameter groups under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bigmodel.backends.precision import MasterWeights

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_stage(
    folder: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    masters: MasterWeights | None,
) -> None:
    """Write this rank's part. Collective over all ranks of the job."""
    save(_state(model, optimizer, masters), checkpoint_id=folder)


def load_stage(
    folder: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    masters: MasterWeights | None,
) -> None:
    """Read what `save_stage` wrote for the same stage."""
    state = _state(model, optimizer, masters)
    load(state, checkpoint_id=folder)
    _fill(model, state["model"])
    if masters is not None:
        _fill(masters.module, state["masters"])
    if optimizer is not None:
        owner = model if masters is None else masters.module
        set_optimizer_state_dict(owner, optimizer, state["optimizer"], options=_FLAT)


def _state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    masters: MasterWeights | None,
) -> dict[str, Any]:
    state: dict[str, Any] = {"model": _tensors(model)}
    owner = model
    if masters is not None:
        owner = masters.module
        state["masters"] = _tensors(owner)
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(owner, optimizer, options=_FLAT)
    return state


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    # Weights tied within the stage once, under their first name.
    kept = {name for name, _ in model.named_parameters()}
    kept |= {name for name, _ in model.named_buffers()}
    return {name: value for name, value in model.state_dict().items() if name in kept}


def _fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    model.load_state_dict(dict(values), strict=False)
