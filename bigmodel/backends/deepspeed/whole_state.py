"""What ZeRO has cut up, under the names and in the shapes of the whole model.

Source: deepspeed 0.19, `runtime/zero/{stage_1_and_2,stage3}.py`. Each rank keeps a
range of the flattened fp32 weights of a group, and of the optimizer's states:

    stages 1, 2   the group's parameters one after another, cut evenly over the ranks
    stage 3       every parameter by itself, cut evenly over the ranks, padded

Padding depends on the number of ranks, so only ranges of real elements leave this file.
Of DeepSpeed's internals, those that keep states are touched here alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.backends.deepspeed.swapping import (
    Swapping,
    has_weight,
    read_weight,
    write_weight,
)
from bigmodel.backends.flat_range import FlatRange
from bigmodel.backends.fresh_states import make_states
from bigmodel.backends.loss_scale import GROWTH_INTERVAL
from bigmodel.backends.optimizers import trainable
from bigmodel.backends.state_files import State, unique_tensors
from bigmodel.errors import UsageError
from bigmodel.plans import Plan


@dataclass(frozen=True, slots=True)
class _Range:
    """Where this rank keeps elements of a parameter in fp32."""

    flat: Tensor
    """The flat parameter that the optimizer steps."""
    at: int
    """Where they begin in it."""
    count: int
    """0 where other ranks keep all of it."""
    start: int
    """Where they begin in the flattened parameter."""
    group: Mapping[str, Any]
    """Settings of the optimizer for it."""
    swapped: bool
    """Whether its memory is a buffer of what is on a disk."""

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of a tensor like `flat`."""
        return flat.detach().view(-1).narrow(0, self.at, self.count)

    def kept(self, flat: Tensor) -> Tensor:
        """Return memory that stays: a copy of what is in a buffer."""
        part = self.of(flat)
        return part.clone() if self.swapped else part


@final
class WholeState:
    """The state of a DeepSpeed engine for files that any plan can read.

    Args:
        engine: DeepSpeed's.
        model: The user's, already sharded.
        plan: The plan.
    """

    def __init__(self, engine: Any, model: nn.Module, plan: Plan) -> None:
        self._zero = engine.optimizer
        self._model = model
        self._sharded = plan.zero_stage == 3
        self._swapping = Swapping(engine.optimizer, plan)
        self._scaled = plan.number_format.scaled
        self._trained = trainable(model)

    def state(self) -> State:
        """Return ranges of weights and states, over the memory that DeepSpeed uses.

        What is on a disk is copied into memory, all of it.

        Raises:
            UsageError: The optimizer keeps something that is not of its weights' shape.
        """
        optimizer: dict[str, Any] = {}
        model = self._untrained()
        for index, names in enumerate(self._groups()):
            made = self._flat(index) not in self._zero.optimizer.state
            with self._swapping.states(index, write=made):
                self._make_states(index)
                for name in names:
                    found = self._range(self._trained[name], index)
                    model[name] = self._add(name, found, optimizer)
        return {"model": model, "optimizer": optimizer, "loss_scale": self._scale()}

    def _add(self, name: str, found: _Range, optimizer: dict[str, Any]) -> FlatRange:
        """Return a weight's range of masters; put those of its states beside it."""
        shape = _shape(self._trained[name])
        for setting, value in found.group.items():
            if setting != "params":
                optimizer[f"param_groups.{name}.{setting}"] = value
        for key, value in self._zero.optimizer.state[found.flat].items():
            optimizer[f"state.{name}.{key}"] = _part(key, value, found, shape)
        return FlatRange(found.kept(found.flat), shape, found.start)

    @torch.no_grad()
    def take_over(self, state: State) -> None:
        """Go on from what was read into `state`; computing weights follow masters."""
        if self._sharded:
            self._zero.checkpoint_event_prologue()
            self._write_untrained(state["model"])
        for index, names in enumerate(self._groups()):
            with self._swapping.states(index, write=True):
                for name in names:
                    self._take(name, index, state)
                if self._sharded:
                    self._zero._reassign_or_swap_out_partitioned_parameters(index)
        if state["loss_scale"]:
            scaler = self._zero.loss_scaler
            scaler.cur_scale = state["loss_scale"]["factor"]
            scaler.cur_iter = int(state["loss_scale"]["good_steps"])
            scaler.last_overflow_iter = -1
        if self._sharded:
            # Gathers what stays whole on every rank.
            self._zero.checkpoint_event_epilogue()
        else:
            self._zero.update_lp_params()

    def _take(self, name: str, index: int, state: State) -> None:
        found = self._range(self._trained[name], index)
        settings: Any = found.group
        for setting in list(settings):
            key = f"param_groups.{name}.{setting}"
            if key in state["optimizer"]:
                settings[setting] = state["optimizer"][key]
        kept = self._zero.optimizer.state[found.flat]
        for key, value in kept.items():
            if not isinstance(value, Tensor):
                kept[key] = state["optimizer"][f"state.{name}.{key}"]
        if not found.swapped:
            # It was read in place.
            return
        found.of(found.flat).copy_(state["model"][name].values)
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.ndim:
                read = state["optimizer"][f"state.{name}.{key}"]
                found.of(value).copy_(read.values)

    def _groups(self) -> list[list[str]]:
        """Return the names of trained parameters by sub-group, or group."""
        names = {id(param): name for name, param in self._trained.items()}
        zero = self._zero
        groups = zero.fp16_groups if self._sharded else zero.bit16_groups
        return [[names[id(param)] for param in several] for several in groups]

    def _untrained(self) -> dict[str, Any]:
        """Return frozen weights and buffers."""
        found = {
            name: value
            for name, value in unique_tensors(self._model).items()
            if name not in self._trained
        }
        for name, param in self._frozen_shards().items():
            kept = read_weight(param)
            start = dist.get_rank() * kept.numel()
            count = max(0, min(kept.numel(), param.ds_numel - start))
            found[name] = FlatRange(kept[:count], param.ds_shape, start)
        return found

    def _write_untrained(self, model: dict[str, Any]) -> None:
        for name, param in self._frozen_shards().items():
            if has_weight(param):
                write_weight(param, model[name].values)

    def _frozen_shards(self) -> dict[str, Any]:
        if not self._sharded:
            return {}
        return {
            name: param
            for name, param in self._model.named_parameters()
            if not param.requires_grad
        }

    def _range(self, param: nn.Parameter, index: int) -> _Range:
        cut: Any = param
        at = count = start = 0
        if self._sharded:
            _, at, count = self._zero.grad_position[self._zero.get_param_id(param)]
            start = dist.get_rank() * count
            count = max(0, min(count, cut.ds_numel - start))
        elif cut._hp_mapping is not None:
            # Otherwise other ranks keep all of it.
            at = cut._hp_mapping.hp_fragment_address.start
            count = cut._hp_mapping.hp_fragment_address.numel
            start = cut._hp_mapping.lp_fragment_address.start
        return _Range(
            flat=self._flat(index),
            at=at,
            count=count,
            start=start,
            group=self._settings(index),
            swapped=self._swapping.has_states(index),
        )

    def _flat(self, index: int) -> Tensor:
        zero = self._zero
        if self._sharded:
            return zero.fp32_partitioned_groups_flat[index]
        return zero.single_partition_of_fp32_groups[index]

    def _settings(self, index: int) -> dict[str, Any]:
        """Return the optimizer's group of a sub-group, or group."""
        zero = self._zero
        if self._sharded:
            index = zero.sub_group_to_group_id[index]
        return zero.optimizer.param_groups[index]

    def _make_states(self, index: int) -> None:
        if not self._sharded:
            make_states(self._zero.optimizer, [self._flat(index)])
            return
        # DeepSpeed takes them out of the optimizer between steps.
        group = self._settings(index)
        group["params"] = [self._flat(index)]
        make_states(self._zero.optimizer, group["params"])
        group["params"] = []

    def _scale(self) -> dict[str, Any]:
        if not self._scaled:
            return {}
        scaler = self._zero.loss_scaler
        good = (scaler.cur_iter - scaler.last_overflow_iter - 1) % GROWTH_INTERVAL
        return {"factor": float(scaler.cur_scale), "good_steps": float(good)}


def _part(key: str, value: Any, found: _Range, shape: torch.Size) -> Any:
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    if value.shape != found.flat.shape:
        raise UsageError(
            f"the optimizer keeps {key!r} of {tuple(value.shape)} for a flat part of "
            f"{tuple(found.flat.shape)} elements, which belongs to no weight; use "
            "an optimizer that keeps states of the weights' shape, or backend 'fsdp2'"
        )
    return FlatRange(found.kept(value), shape, found.start)


def _shape(param: Any) -> torch.Size:
    return getattr(param, "ds_shape", param.shape)
