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
        self._scaled = plan.number_format.scaled
        self._trained = trainable(model)

    def state(self) -> State:
        """Return ranges of weights and states, over the memory that DeepSpeed uses.

        Raises:
            UsageError: The optimizer keeps something that is not of its weights' shape.
        """
        self._make_states()
        optimizer: dict[str, Any] = {}
        model = self._untrained()
        for name, param in self._trained.items():
            shape, found = _shape(param), self._range(param)
            for setting, value in found.group.items():
                if setting != "params":
                    optimizer[f"param_groups.{name}.{setting}"] = value
            for key, value in self._zero.optimizer.state[found.flat].items():
                optimizer[f"state.{name}.{key}"] = _part(key, value, found, shape)
            model[name] = FlatRange(_narrow(found.flat, found), shape, found.start)
        return {"model": model, "optimizer": optimizer, "loss_scale": self._scale()}

    @torch.no_grad()
    def take_over(self, state: State) -> None:
        """Go on from what was read into `state`; computing weights follow masters."""
        for name, param in self._trained.items():
            found = self._range(param)
            settings: Any = found.group
            for setting in list(settings):
                key = f"param_groups.{name}.{setting}"
                if key in state["optimizer"]:
                    settings[setting] = state["optimizer"][key]
            kept = self._zero.optimizer.state[found.flat]
            for key, value in kept.items():
                if not isinstance(value, Tensor):
                    kept[key] = state["optimizer"][f"state.{name}.{key}"]
        if state["loss_scale"]:
            scaler = self._zero.loss_scaler
            scaler.cur_scale = state["loss_scale"]["factor"]
            scaler.cur_iter = int(state["loss_scale"]["good_steps"])
            scaler.last_overflow_iter = -1
        if not self._sharded:
            self._zero.update_lp_params()
            return
        self._zero.checkpoint_event_prologue()
        for index in range(len(self._zero.fp32_partitioned_groups_flat)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        # Gathers what stays whole on every rank.
        self._zero.checkpoint_event_epilogue()

    def _untrained(self) -> dict[str, Any]:
        """Return frozen weights and buffers."""
        found = {
            name: value
            for name, value in unique_tensors(self._model).items()
            if name not in self._trained
        }
        if not self._sharded:
            return found
        for name, param in self._model.named_parameters():
            if not param.requires_grad:
                shard: Any = param
                kept = shard.ds_tensor.detach().view(-1)
                start = dist.get_rank() * kept.numel()
                count = max(0, min(kept.numel(), shard.ds_numel - start))
                found[name] = FlatRange(kept[:count], shard.ds_shape, start)
        return found

    def _range(self, param: nn.Parameter) -> _Range:
        zero = self._zero
        groups = zero.optimizer.param_groups
        cut: Any = param
        if self._sharded:
            index, at, count = zero.grad_position[zero.get_param_id(param)]
            start = dist.get_rank() * count
            return _Range(
                flat=zero.fp32_partitioned_groups_flat[index],
                at=at,
                count=max(0, min(count, cut.ds_numel - start)),
                start=start,
                group=groups[zero.sub_group_to_group_id[index]],
            )
        mapping = cut._hp_mapping
        if mapping is None:
            # Other ranks keep all of it; what its group has in common is known here.
            index = next(
                index
                for index, several in enumerate(zero.bit16_groups)
                if any(other is param for other in several)
            )
            flat = zero.single_partition_of_fp32_groups[index]
            return _Range(flat=flat, at=0, count=0, start=0, group=groups[index])
        index = mapping.param_group_index
        return _Range(
            flat=zero.single_partition_of_fp32_groups[index],
            at=mapping.hp_fragment_address.start,
            count=mapping.hp_fragment_address.numel,
            start=mapping.lp_fragment_address.start,
            group=groups[index],
        )

    def _make_states(self) -> None:
        if self._sharded:
            # DeepSpeed takes them out of the optimizer between steps.
            self._zero._set_fp32_optimizer_param_groups()
            make_states(self._zero.optimizer, self._zero.fp32_partitioned_groups_flat)
            self._zero._clear_fp32_optimizer_param_groups()
        else:
            flats = self._zero.single_partition_of_fp32_groups
            make_states(self._zero.optimizer, flats)

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
    return FlatRange(_narrow(value, found), shape, found.start)


def _narrow(flat: Tensor, found: _Range) -> Tensor:
    return flat.detach().view(-1).narrow(0, found.at, found.count)


def _shape(param: Any) -> torch.Size:
    return getattr(param, "ds_shape", param.shape)
