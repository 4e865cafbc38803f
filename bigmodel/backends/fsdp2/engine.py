"""Training with `fully_shard`, torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bigmodel.backends.engine import AbstractEngine, Batch, Job, Update
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.sharding import shard
from bigmodel.backends.state_files import load_state, save_state
from bigmodel.backends.updating import Updater
from bigmodel.backends.whole_model import AbstractWholeModelEngine
from bigmodel.observe.blocks import get_blocks
from bigmodel.plans import Plan


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank."""
    return Fsdp2Engine(job)


@final
class Fsdp2Engine(AbstractWholeModelEngine):
    """Every block and the rest of the model is one group of shards.

    Gradients are reduced to shards after every micro-batch, as FSDP2 does by default
    and as the memory of a plan assumes: postponing it would keep whole gradients in
    fp32. With `replicate` > 1 only the shards of the last micro-batch's sum travel
    between the replicas. Weights stay fp32 shards, so they are their own masters.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        plan = job.plan
        self._model = model = job.model
        blocks = get_blocks(model, plan.units)
        apply_recompute(blocks, plan)
        self._root = shard(model, blocks, plan, _mesh(plan, job.device))
        self._updater = Updater(
            model, job.optimizer, plan, job.clip_norm, own_masters=False
        )

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
        return self._updater.update()

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss of this rank's batch; weights are gathered meanwhile."""
        loss = super().evaluate(batch)
        # Without a backward the root group would stay gathered until the next one.
        self._root.reshard()
        return loss

    def model_state(self) -> dict[str, Tensor]:
        """Gather the weights, one at a time, to rank 0."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(_tensors(get_model_state_dict(self._model, options=options)))

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
