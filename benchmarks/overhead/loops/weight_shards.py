"""Weights, gradients and optimizer states in shards: torch's FSDP2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.overhead.loops.loop import Batch, Loop, micro_batches
from benchmarks.overhead.subjects import (
    ACCUMULATION,
    CLIP_NORM,
    WORLD,
    loss_of,
    make_model,
    make_optimizer,
)
from bigmodel.plans import Plan


def fsdp2(plan: Plan) -> Loop:
    model = make_model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())

    def step(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for index, micro in enumerate(micro_batches(batch)):
            model.set_is_last_backward(index == ACCUMULATION - 1)
            loss = loss_of(model(micro[0]), micro) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Loop(step)
