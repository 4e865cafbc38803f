"""DeepSpeed's ZeRO."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.overhead.loops.loop import Batch, Loop, micro_batches
from benchmarks.overhead.subjects import (
    ACCUMULATION,
    CLIP_NORM,
    loss_of,
    make_model,
    make_optimizer,
)
from bigmodel.backends.deepspeed.config import deepspeed_config
from bigmodel.backends.deepspeed_library import import_deepspeed
from bigmodel.plans import Plan


def deepspeed(plan: Plan) -> Loop:
    model = make_model()
    engine, *_ = import_deepspeed(torch.device("cpu")).initialize(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        config=deepspeed_config(plan, CLIP_NORM),
        dist_init_required=False,
    )

    def step(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for micro in micro_batches(batch):
            loss = loss_of(engine(micro[0]), micro)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / ACCUMULATION
        return total

    return Loop(step)
