"""Optimizer states in shards: fairscale's OSS, in DDP or in ShardedDataParallel."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.overhead.loops.loop import Batch, Loop, micro_batches
from benchmarks.overhead.subjects import (
    ACCUMULATION,
    CLIP_NORM,
    loss_of,
    make_model,
    make_optimizer,
)
from bigmodel.plans import Plan


def fairscale(plan: Plan) -> Loop:
    with warnings.catch_warnings():
        # It imports parts of torch that have moved since its last release.
        warnings.simplefilter("ignore")
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

    model = make_model()
    optimizer = OSS(
        model.parameters(), optim=make_optimizer.func, **make_optimizer.keywords
    )
    wrapped: nn.Module
    if plan.zero_stage == 2:
        wrapped = ShardedDataParallel(
            model,
            optimizer,
            reduce_buffer_size=plan.fairscale.reduce_buffer_elements,
            sync_models_at_startup=False,
        )
    else:
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=25
        )

    def step(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for index, micro in enumerate(micro_batches(batch)):
            last = index == ACCUMULATION - 1
            with nullcontext() if last else wrapped.no_sync():
                loss = loss_of(wrapped(micro[0]), micro) / ACCUMULATION
                loss.backward()
            total += loss.detach()
        # Its own: a rank clips what it steps.
        optimizer.clip_grad_norm(CLIP_NORM)
        optimizer.step()
        # The wrapper's own: gradients that ShardedDataParallel keeps in its buckets
        # must stay there, or the buckets send what they held before.
        wrapped.zero_grad(set_to_none=True)
        return total

    return Loop(step)
