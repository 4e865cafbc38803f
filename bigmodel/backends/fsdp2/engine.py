"""Training with `fully_shard`, torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from bigmodel.backends.engine import AbstractEngine, Batch, Job
from bigmodel.backends.evaluation import evaluating
from bigmodel.backends.forward import call_model, compute_loss
from bigmodel.backends.optimizers import build_optimizer, trainable
from bigmodel.backends.precision import autocast
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.sharding import shard
from bigmodel.backends.state_files import load_state, save_state
from bigmodel.observe.blocks import get_blocks
from bigmodel.plans import Plan


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank."""
    return Fsdp2Engine(job)


@final
class Fsdp2Engine(AbstractEngine):
    """Every block and the rest of the model is one group of shards.

    Gradients are reduced to shards after every micro-batch, as FSDP2 does by default
    and as the memory of a plan assumes: postponing it would keep whole gradients in
    fp32. With `replicate` > 1 only the shards of the last micro-batch's sum travel
    between the replicas.
    """

    def __init__(self, job: Job) -> None:
        self._plan = plan = job.plan
        self._loss = job.loss
        self._clip_norm = job.clip_norm
        self._device = job.device
        self._model = model = job.model
        blocks = get_blocks(model, plan.units)
        apply_recompute(blocks, plan)
        self._root = shard(model, blocks, plan, _mesh(plan, job.device))
        self._params = trainable(model)
        self._optimizer = build_optimizer(job.optimizer, self._params)

    def forward_backward(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Accumulate shards of gradients over the micro-batches."""
        total = torch.zeros((), device=self._device)
        last = len(micro_batches) - 1
        for index, batch in enumerate(micro_batches):
            self._root.set_is_last_backward(index == last)
            if self._plan.mesh.replicate > 1:
                self._root.set_requires_all_reduce(index == last)
            loss = self._forward(batch)
            (loss / len(micro_batches)).backward()
            total += loss.detach()
        return total / len(micro_batches)

    def update(self) -> Tensor | None:
        """Clip, step and drop the gradients."""
        norm: Tensor | None = None
        if self._clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(
                self._params.values(), self._clip_norm
            )
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
        self._optimizer.step()
        # Not the optimizer's: a factory may have left parameters out.
        self._model.zero_grad(set_to_none=True)
        return norm

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss of this rank's batch; weights are gathered meanwhile."""
        with evaluating(self._model):
            loss = self._forward(batch).detach()
        # Without a backward the root group would stay gathered until the next one.
        self._root.reshard()
        return loss

    def model_state(self) -> dict[str, Tensor]:
        """Gather the weights, one at a time, to rank 0."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(_tensors(get_model_state_dict(self._model, options=options)))

    def save(self, folder: str) -> None:
        """Write the shards of all ranks."""
        save_state(folder, self._model, self._optimizer)

    def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        load_state(folder, self._model, self._optimizer)

    def _forward(self, batch: Batch) -> Tensor:
        with autocast(self._plan, self._device):
            output: Any = call_model(self._model, batch, self._loss)
            return compute_loss(self._model, output, batch, self._loss)


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
