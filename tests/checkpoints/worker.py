"""A rank that reads the checkpoints of other numbers of ranks, under every layout.

    torchrun --nproc-per-node WORLD worker.py FOLDER FROM

FROM is the world size of the launch before, or 0. Writes FOLDER/WORLD/NAME, a
checkpoint for every layout, and FOLDER/WORLD/losses.json.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.layouts import all_layouts
from benchmarks.parity.models import SUBJECTS, make_model, make_optimizer
from bigmodel.plans import Mesh, Plan
from bigmodel.running.session import Engine, prepare
from tests.cases.deepspeed_checks import zero

GLOBAL_BATCH = 24
BASE = "base"
"""Written by replicas after some steps; every layout reads it."""
TEN = "ten"
"""Of a model with ten weights, handed on from world size to world size."""
SHOWN = {
    4: ("zero1", "zero3-hpz", "hybrid", "1f1b-ddp", "interleaved-fsdp2"),
    3: ("ddp-zero1", "fsdp2", "zero1", "zero2", "zero3", "oss"),
    2: (
        "ddp-bf16", "ddp-powersgd", "ddp-unused", "oss", "sharded-ddp",
        "zero1", "zero2-offload", "zero2-bf16", "zero3", "zero3-offload",
        "zero3-bf16", "fsdp2", "fsdp2-bf16", "fsdp2-ignored", "gpipe", "zbv",
        "gpipe-bf16",
    ),
}  # fmt: skip
"""Layouts by world size: every engine's way of keeping states, in 2, 3 or 4 parts."""
GPT = SUBJECTS["gpt2"]


def layouts(world: int) -> Iterator[tuple[str, Plan]]:
    """Yield the layouts that are shown, and some in half precision."""
    for name, plan in all_layouts(world, GPT.units, GPT.elements):
        share = GLOBAL_BATCH // plan.mesh.data_parallel // plan.accumulation
        plan = replace(plan, micro_batch=share)
        if name in SHOWN[world]:
            yield name, plan
        if f"{name}-bf16" in SHOWN[world]:
            yield f"{name}-bf16", replace(plan, precision="bf16")


def engine_of(plan: Plan) -> Engine:
    return prepare(plan, make_model("gpt2", freeze=True), make_optimizer, GPT.loss)


def step(engine: Engine) -> float:
    size = engine.plan.local_batch
    begin = engine.plan.mesh.data_rank(engine.rank) * size
    batch = GPT.data(GLOBAL_BATCH)
    part = {name: value[begin : begin + size] for name, value in batch.items()}
    return float(engine.step(part).loss)


def ten_weights() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 2, bias=False)


def mean_square(output: torch.Tensor, batch) -> torch.Tensor:
    return output.square().mean()


def hand_on_ten(folder: Path, world: int, before: int) -> None:
    """ZERO-05: 10 weights in partitions of 3, then of 4, then of 5, padded."""
    for stage in (1, 2, 3):
        plan = replace(zero(stage), mesh=Mesh(shard=world))
        with prepare(plan, ten_weights(), make_optimizer, mean_square) as engine:
            if before:
                engine.load(folder / str(before) / f"{TEN}-{stage}")
            else:
                for _ in range(2):
                    engine.step((torch.ones(1, 5), torch.zeros(1)))
            engine.save(folder / str(world) / f"{TEN}-{stage}")


def main() -> None:
    folder, before = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world = dist.get_world_size()
    losses: dict[str, float | str] = {}
    if not before:
        plan = Plan(
            backend="ddp", mesh=Mesh(replicate=world), micro_batch=GLOBAL_BATCH // 4
        )
        with engine_of(plan) as engine:
            for _ in range(3):
                step(engine)
            engine.save(folder / BASE)
            losses[BASE] = step(engine)
    hand_on_ten(folder, world, before)
    for name, plan in layouts(world):
        try:
            with engine_of(plan) as engine:
                engine.load(folder / BASE)
                engine.save(folder / str(world) / name)
                losses[name] = step(engine)
        except Exception:
            losses[name] = traceback.format_exc()
    if dist.get_rank() == 0:
        (folder / str(world) / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
