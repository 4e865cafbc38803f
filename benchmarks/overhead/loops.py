"""The loops that people write by hand, one for each library."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.overhead.subjects import (
    ACCUMULATION,
    CLIP_NORM,
    MICRO_BATCH,
    UNITS,
    WORLD,
    loss_of,
    make_batch,
    make_model,
    make_optimizer,
)
from bigmodel.backends.deepspeed.config import deepspeed_config
from bigmodel.plans import Plan


class Loop:
    """A step, with the name that `Engine` has for it."""

    def __init__(self, step: Callable[[Any], Tensor]) -> None:
        self.step = step

    def close(self) -> None:
        """Drop all that the step holds."""
        del self.step
        gc.collect()


def _micro_batches(batch: tuple[Tensor, Tensor]) -> zip:
    return zip(*(part.split(MICRO_BATCH) for part in batch), strict=True)


def ddp(plan: Plan) -> Loop:
    model = make_model()
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=25
    )
    optimizer = make_optimizer(model.parameters())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        total = torch.zeros(())
        for index, micro in enumerate(_micro_batches(batch)):
            wrapped.require_backward_grad_sync = index == ACCUMULATION - 1
            loss = loss_of(wrapped(micro[0]), micro) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Loop(step)


def fsdp2(plan: Plan) -> Loop:
    model = make_model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        total = torch.zeros(())
        for index, micro in enumerate(_micro_batches(batch)):
            model.set_is_last_backward(index == ACCUMULATION - 1)
            loss = loss_of(model(micro[0]), micro) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Loop(step)


def deepspeed(plan: Plan) -> Loop:
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible

    # Else DeepSpeed compiles a collective of its own at first start, for minutes.
    compatible["deepspeed_shm_comm"] = False
    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        config=deepspeed_config(plan, CLIP_NORM),
        dist_init_required=False,
    )

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        total = torch.zeros(())
        for micro in _micro_batches(batch):
            loss = loss_of(engine(micro[0]), micro)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / ACCUMULATION
        return total

    return Loop(step)


def pipeline(plan: Plan) -> Loop:
    rank = dist.get_rank()
    bounds = (0, *plan.stages.cuts, len(UNITS))
    part = make_model()[bounds[rank] : bounds[rank + 1]]
    # Else torch finds out the shapes by a backward of its own.
    features = make_batch(MICRO_BATCH)[0]
    with torch.device("meta"):
        entry = features.to("meta")
        whole = make_model()
        for index, layer in enumerate(whole):
            if index == bounds[rank]:
                start = entry
            entry = layer(entry)
            if index == bounds[rank + 1] - 1:
                end = entry
    stage = PipelineStage(
        part,
        rank,
        WORLD,
        torch.device("cpu"),
        input_args=(start.detach().requires_grad_(rank > 0),),
        output_args=(end.detach().requires_grad_(),),
    )
    schedule = Schedule1F1B(
        stage,
        n_microbatches=ACCUMULATION,
        loss_fn=lambda output, target: loss_of(output, (output, target)),
    )
    optimizer = make_optimizer(part.parameters())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=losses, return_outputs=False)
        square = nn.utils.get_total_norm(
            [value.grad for value in part.parameters() if value.grad is not None]
        ).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(part.parameters(), CLIP_NORM, square.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return Loop(step)


LOOPS: dict[str, Callable[[Plan], Loop]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "pipeline": pipeline,
}
"""From a plan's backend to its loop."""
