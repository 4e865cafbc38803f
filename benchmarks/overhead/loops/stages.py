"""A pipeline stage on every rank, 1F1B: torch's and DeepSpeed's."""

from __future__ import annotations

import contextlib
import io

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.overhead.loops.loop import Batch, Loop, micro_batches
from benchmarks.overhead.subjects import (
    ACCUMULATION,
    CLIP_NORM,
    MICRO_BATCH,
    UNITS,
    WORLD,
    layers,
    loss_of,
    make_batch,
    make_model,
    make_optimizer,
)
from bigmodel.backends.deepspeed_library import import_deepspeed
from bigmodel.backends.deepspeed_pipeline.config import pipeline_config
from bigmodel.plans import Plan


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
    schedule = Schedule1F1B(stage, n_microbatches=ACCUMULATION, loss_fn=_loss)
    optimizer = make_optimizer(part.parameters())

    def step(batch: Batch) -> Tensor:
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


def deepspeed_pipeline(plan: Plan) -> Loop:
    deepspeed = import_deepspeed(torch.device("cpu"))
    from deepspeed.pipe import LayerSpec, PipelineModule

    # A PipelineModule asks DeepSpeed for the ranks before `initialize` is called.
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    torch.manual_seed(0)
    # It prints its stages.
    with contextlib.redirect_stdout(io.StringIO()):
        module = PipelineModule(
            [LayerSpec(make.func, *make.args, **make.keywords) for make in layers()],
            num_stages=WORLD,
            # The plan's cut is in the middle too.
            partition_method="uniform",
            loss_fn=_loss,
        )
    for parameter in module.parameters():
        # Else DeepSpeed's norm is that of the first stage alone.
        parameter.model_parallel = True
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=make_optimizer(module.parameters()),
        config=pipeline_config(plan, CLIP_NORM),
        dist_init_required=False,
    )

    def step(batch: Batch) -> Tensor:
        return engine.train_batch(iter(micro_batches(batch)))

    return Loop(step)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return loss_of(output, (output, target))
