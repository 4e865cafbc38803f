"""Whole models on every rank, gradients averaged: DDP and Horovod."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.overhead.loops.loop import (
    Batch,
    Loop,
    accumulating_loop,
    micro_batches,
)
from benchmarks.overhead.subjects import (
    ACCUMULATION,
    CLIP_NORM,
    loss_of,
    make_model,
    make_optimizer,
)
from bigmodel.plans import Plan


def ddp(plan: Plan) -> Loop:
    model = make_model()
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=25
    )

    def synchronise(last: bool) -> None:
        wrapped.require_backward_grad_sync = last

    return accumulating_loop(model, wrapped, synchronise)


def horovod(plan: Plan) -> Loop:
    import horovod.torch as hvd

    # `prepare` has started it, as torchrun does not; a second call does nothing.
    hvd.init()
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(model.parameters()),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=ACCUMULATION,
    )

    def step(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for micro in micro_batches(batch):
            loss = loss_of(model(micro[0]), micro) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        # The norm is that of the averaged gradients.
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        return total

    return Loop(step)
