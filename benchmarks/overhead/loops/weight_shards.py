"""Weights, gradients and optimizer states in shards: torch's FSDP2."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.overhead.loops.loop import Loop, accumulating_loop
from benchmarks.overhead.subjects import WORLD, make_model
from bigmodel.plans import Plan


def fsdp2(plan: Plan) -> Loop:
    model = make_model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return accumulating_loop(model, model, model.set_is_last_backward)
