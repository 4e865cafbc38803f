"""Training with `fully_shard`, torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bigmodel.backends.compiling import apply_compile
from bigmodel.backends.engine import AbstractEngine, Job, Update
from bigmodel.backends.first_rank import FirstRankValues, check_same_structure
from bigmodel.backends.fsdp2.methods import open_methods
from bigmodel.backends.fsdp2.whole_parameters import (
    WholeParameters,
    clip_shards_and_whole,
    separate_groups,
)
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.sharding import shard
from bigmodel.backends.state_files import load_state, save_state
from bigmodel.backends.updating import Updater
from bigmodel.backends.whole_model import AbstractWholeModelEngine
from bigmodel.errors import UsageError
from bigmodel.observe.blocks import get_blocks
from bigmodel.plans import Plan


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank."""
    return Fsdp2Engine(job)


@final
class Fsdp2Engine(AbstractWholeModelEngine):
    """Every block and the rest of the model is one group of shards.

    Gradients are reduced to shards after every micro-batch, as FSDP2 does by default
    and as the memory of a plan assumes; `postpone_reduction` keeps whole gradients
    until the last one. With `replicate` > 1 only the shards of the last micro-batch's
    sum travel between the replicas. Weights stay fp32 shards, so they are their own
    masters.

    Values are those of rank 0. The other ranks may have a model on the `meta` device:
    a group of weights is made, filled and sharded before the next one.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        plan = job.plan
        self._model = model = job.model
        check_same_structure(model)
        if plan.offload.parameters == "cpu":
            _check_cpu_collectives()
        blocks = get_blocks(model, plan.units)
        apply_compile(blocks or {"": model}, plan, job.device)
        apply_recompute(blocks, plan)
        self._whole = WholeParameters(model, plan.fsdp2.ignored)
        self._root = shard(
            model,
            blocks,
            plan,
            _mesh(plan, job.device),
            ignored=self._whole.parameters,
            fill=FirstRankValues(job.device).fill,
        )
        _check_values(model)
        open_methods(model, plan.fsdp2.methods)
        self._updater = Updater(
            model,
            job.optimizer,
            plan,
            job.clip_norm,
            clip=clip_shards_and_whole if plan.fsdp2.ignored else None,
            own_masters=False,
        )
        if plan.fsdp2.ignored and self._updater.optimizer is not None:
            separate_groups(self._updater.optimizer)

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer over the shards."""
        return self._updater.optimizer

    def begin(self, *, last: bool) -> None:
        """Keep buffers between micro-batches, and replicas apart until the last."""
        self._root.set_is_last_backward(last)
        if self._plan.fsdp2.postpone_reduction:
            self._root.set_requires_gradient_sync(last)
        if self._plan.mesh.replicate > 1:
            self._root.set_requires_all_reduce(last)

    def call(self, *positional: Any, **named: Any) -> Any:
        """Call the model; its hooks gather the weights and cast the inputs."""
        return self._model(*positional, **named)

    def backward(self, loss: Tensor) -> None:
        """Run backward, which reduces gradients to shards."""
        self._updater.scale.scale(loss).backward()

    def update(self) -> Update:
        """Clip, step and drop the gradients."""
        self._whole.average_gradients()
        return self._updater.update()

    def end_evaluation(self) -> None:
        """Reshard, or gathered weights would stay until the next backward."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def model_state(self) -> dict[str, Tensor]:
        """Gather the weights, one at a time, to rank 0."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._model, options=options)
        # What is whole on every rank is handed out as it is; shards are gathered anew.
        held = {
            value.untyped_storage().data_ptr()
            for value in (*self._model.parameters(), *self._model.buffers())
            if not isinstance(value, DTensor)
        }
        return {
            name: value.clone() if value.untyped_storage().data_ptr() in held else value
            for name, value in _tensors(state)
        }

    def save(self, folder: str) -> None:
        """Write the shards of all ranks."""
        save_state(folder, self._model, self._updater)

    def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        load_state(folder, self._model, self._updater)


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield name, value


def _check_cpu_collectives() -> None:
    """Find out now, not at the first step, whether offloaded gradients can be reduced.

    Raises:
        UsageError: The process group cannot reduce tensors in the CPU's memory.
    """
    backends = dist.get_backend_config()
    if "cpu" not in backends:
        raise UsageError(
            f"offloaded gradients are clipped in the CPU's memory, and the process "
            f"group has only {backends}; let bigmodel make the group, or make it with "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )
    dist.all_reduce(torch.zeros(()))


def _check_values(model: nn.Module) -> None:
    """Make sure that the weights are where and what the plan says.

    Raises:
        UsageError: A tensor has no values, or a weight is not its own fp32 master.
    """
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            raise UsageError(f"{name!r} has no values: it is on the meta device")
    for name, value in model.named_parameters():
        if value.is_floating_point() and value.dtype != torch.float32:
            raise UsageError(
                f"{name!r} is {value.dtype} and not float32, so that small updates "
                "would be lost; make the model in float32, the plan casts it"
            )


def _mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    if plan.mesh.replicate == 1:
        return init_device_mesh(
            device.type, (plan.mesh.shard,), mesh_dim_names=("shard",)
        )
    return init_device_mesh(
        device.type,
        (plan.mesh.replicate, plan.mesh.shard),
        mesh_dim_names=("replicate", "shard"),
    )
