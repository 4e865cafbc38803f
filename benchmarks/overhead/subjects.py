"""The model that is trained both ways, and its plans."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bigmodel.plans import DeepSpeedOptions, Mesh, Plan, Stages

WORLD = 2
LAYERS = 4
WIDTH = 256
TOKENS = 128
CLASSES = 64
MICRO_BATCH = 4
ACCUMULATION = 2
CLIP_NORM = 1.0
UNITS = tuple(str(index) for index in range(LAYERS + 2))

make_optimizer = partial(torch.optim.AdamW, lr=1e-4)


def layers() -> list[partial[Any]]:
    """Return what makes each layer: encoders between an embedding and a head."""
    encoder = partial(
        nn.TransformerEncoderLayer,
        WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True,
    )  # fmt: skip
    embedding = partial(nn.Linear, CLASSES, WIDTH)
    head = partial(nn.Linear, WIDTH, CLASSES)
    return [embedding, *[encoder] * LAYERS, head]


def make_model() -> nn.Sequential:
    """3.2 M parameters, the same ones in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in layers()))


def make_batch(samples: int) -> tuple[Tensor, Tensor]:
    """Random features of every token, and classes."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(samples, TOKENS, CLASSES, generator=generator)
    return features, torch.randint(CLASSES, (samples, TOKENS), generator=generator)


def loss_of(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def plans() -> Iterator[tuple[str, Plan]]:
    """Yield a plan for every hand-written loop, first those of `WORLD` processes."""
    yield from _of_several_processes()
    yield from _of_one_process()


def _of_several_processes() -> Iterator[tuple[str, Plan]]:
    copies, shards = Mesh(replicate=WORLD), Mesh(shard=WORLD)
    yield "ddp", _plan("ddp", mesh=copies)
    yield "horovod", _plan("horovod", mesh=copies)
    yield "fsdp2", _plan("fsdp2", mesh=shards)
    for stage, name in ((1, "oss"), (2, "sharded-ddp")):
        yield name, _plan("fairscale", mesh=shards, zero_stage=stage)
    buckets = DeepSpeedOptions(bucket_elements=2_000_000)
    for stage in (1, 2, 3):
        plan = _plan("deepspeed", mesh=shards, zero_stage=stage, deepspeed=buckets)
        yield f"zero{stage}", plan
    stages = {"mesh": Mesh(pipeline=WORLD), "stages": _stages("1f1b")}
    yield "1f1b", _plan("pipeline", **stages)
    yield "dspipe", _plan("deepspeed_pipeline", **stages)


def _of_one_process() -> Iterator[tuple[str, Plan]]:
    yield "one-process", _plan("ddp")
    yield "dataparallel", _plan("dataparallel", devices_per_process=2)
    for name, backend, schedule in (
        ("naive", "naive", "naive"),
        ("pipe", "fairscale_pipe", "gpipe"),
    ):
        stages = _stages(schedule)
        yield name, _plan(backend, devices_per_process=2, stages=stages)


def _plan(backend: str, **options: Any) -> Plan:
    return Plan(
        backend=backend,
        units=UNITS,
        micro_batch=MICRO_BATCH,
        accumulation=ACCUMULATION,
        **options,
    )


def _stages(schedule: str) -> Stages:
    return Stages(schedule=schedule, cuts=(len(UNITS) // 2,))
