"""Weights and optimizer states in files, by torch's distributed checkpoint.

Every backend but DeepSpeed's pipeline engine writes the same names, so that a
checkpoint of one plan can be read under another:

    model.NAME                     weights, in fp32 where there are masters, and buffers
    optimizer.state.NAME.KEY       what the optimizer keeps of a parameter
    optimizer.param_groups.NAME.K  settings of its group
    loss_scale.*                   where losses are scaled

Whole tensors are written once, shards by the ranks that hold them, and read in
whichever shards the reader has. Tied weights are there under their first name in the
whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bigmodel.backends.flat_range import (
    FlatRange,
    RangeLoadPlanner,
    RangeSavePlanner,
)
from bigmodel.backends.fresh_states import make_states
from bigmodel.backends.updating import Updater
from bigmodel.errors import UsageError

State = dict[str, dict[str, Any]]
"""The parts `model`, `optimizer` and `loss_scale`, by names within them."""

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_SETTINGS = "param_groups."
_NAMED = 5
"""Names that a message lists."""
_NONE_TIED: Mapping[str, str] = MappingProxyType({})


def write_files(folder: str, state: State) -> None:
    """Write this rank's part of a state.

    Args:
        folder: Exists; what it held is replaced.
        state: Tensors, DTensors, flat ranges, and plain values.
    """
    writer = FileSystemWriter(folder, overwrite=True)
    save({**state}, storage_writer=writer, planner=RangeSavePlanner())


def read_files(folder: str, state: State) -> None:
    """Read into the tensors of a state in place; plain values are replaced.

    Settings of groups, and a loss scale, that the files lack stay as they are.

    Raises:
        UsageError: The files lack a tensor, or have it in another shape.
    """
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    wrong = []
    for part, values in state.items():
        for name, value in list(values.items()):
            found = known.get(f"{part}.{name}")
            if found is None and (part == "loss_scale" or name.startswith(_SETTINGS)):
                del values[name]
            elif found is None:
                wrong.append(f"{part}.{name} is not in it")
            elif (
                isinstance(value, (Tensor, FlatRange))
                and isinstance(found, TensorStorageMetadata)
                and value.size() != found.size
            ):
                there, here = _shape(found.size), _shape(value.size())
                wrong.append(f"{part}.{name} is {there}, not {here}")
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise UsageError(
            f"the checkpoint in {folder!r} is not one of this model and optimizer: "
            f"{'; '.join(wrong[:_NAMED])}{more}"
        )
    load({**state}, checkpoint_id=folder, planner=RangeLoadPlanner())


def save_state(
    folder: str,
    model: nn.Module,
    updater: Updater,
    first_names: Mapping[str, str] = _NONE_TIED,
) -> None:
    """Write this rank's part of the model's tensors and optimizer states.

    Args:
        folder: Exists; what it held is replaced.
        model: The model, or the stage.
        updater: Holds the optimizer, masters and loss scale.
        first_names: From a tied weight's names to its first one in the whole model,
            where this rank may have it under another.
    """
    write_files(folder, _renamed(_state(model, updater), first_names))


def load_state(
    folder: str,
    model: nn.Module,
    updater: Updater,
    first_names: Mapping[str, str] = _NONE_TIED,
) -> None:
    """Read what `save_state` wrote for an equal model, under any plan.

    Raises:
        UsageError: It was another model or optimizer.
    """
    # Reading fills tensors in place: those of the model, masters and optimizer.
    state = _state(model, updater)
    read = _renamed(state, first_names)
    read_files(folder, read)
    masters = updater.masters
    if masters is not None:
        masters.scatter_weights()
    if updater.local_optimizer is not None:
        own = {
            name: read["optimizer"].get(_first_of_key(name, first_names), value)
            for name, value in state["optimizer"].items()
        }
        set_optimizer_state_dict(
            model if masters is None else masters.module,
            updater.local_optimizer,
            own,
            options=_FLAT,
        )
    if read["loss_scale"]:
        updater.scale.restore(read["loss_scale"])


def _state(model: nn.Module, updater: Updater) -> State:
    masters = updater.masters
    owner = model
    weights = unique_tensors(model)
    optimizer: dict[str, Any] = {}
    if masters is not None:
        owner = masters.module
        weights |= {name: value.detach() for name, value in masters.named().items()}
    local = updater.local_optimizer
    if local is not None:
        groups = local.param_groups
        make_states(local, [param for group in groups for param in group["params"]])
        optimizer = get_optimizer_state_dict(owner, local, options=_FLAT)
    return {
        "model": weights,
        "optimizer": optimizer,
        "loss_scale": dict(updater.scale.state()) if updater.scale.enabled else {},
    }


def unique_tensors(model: nn.Module) -> dict[str, Any]:
    """Return tied weights once, under their first name, and persistent buffers."""
    kept = {name for name, _ in model.named_parameters()}
    kept |= {name for name, _ in model.named_buffers()}
    return {
        name: value
        for name, value in model.state_dict().items()
        if name in kept and isinstance(value, Tensor)
    }


def _renamed(state: State, first_names: Mapping[str, str]) -> State:
    return {
        "model": {first_names.get(k, k): v for k, v in state["model"].items()},
        "optimizer": {
            _first_of_key(k, first_names): v for k, v in state["optimizer"].items()
        },
        "loss_scale": dict(state["loss_scale"]),
    }


def _first_of_key(key: str, first_names: Mapping[str, str]) -> str:
    """Rename the parameter in `state.NAME.KEY` or `param_groups.NAME.KEY`."""
    part, _, rest = key.partition(".")
    name, _, leaf = rest.rpartition(".")
    return f"{part}.{first_names.get(name, name)}.{leaf}"


def _shape(size: Any) -> str:
    return " x ".join(map(str, size)) or "a single number"
