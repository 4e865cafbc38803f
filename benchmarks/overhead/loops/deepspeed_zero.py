"""DeepSpeed's ZeRO, and how its library is loaded on CPUs."""

from __future__ import annotations

from typing import Any

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
from bigmodel.plans import Plan


def deepspeed(plan: Plan) -> Loop:
    model = make_model()
    engine, *_ = import_deepspeed().initialize(
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


def import_deepspeed() -> Any:
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible

    # Else DeepSpeed compiles a collective of its own at first start, for minutes.
    compatible["deepspeed_shm_comm"] = False
    return deepspeed
