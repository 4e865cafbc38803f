"""The model that is trained both ways, and its plans."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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


def make_model() -> nn.Sequential:
    """Four encoder layers between an embedding and a head, 3.2 M parameters."""
    torch.manual_seed(0)
    layer = partial(
        nn.TransformerEncoderLayer,
        WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True,
    )  # fmt: skip
    blocks = [layer() for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(CLASSES, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))


def make_batch(samples: int) -> tuple[Tensor, Tensor]:
    """Random features of every token, and classes."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(samples, TOKENS, CLASSES, generator=generator)
    return features, torch.randint(CLASSES, (samples, TOKENS), generator=generator)


def loss_of(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def plans() -> Iterator[tuple[str, Plan]]:
    """Yield a plan for every hand-written loop."""
    common = {
        "units": UNITS,
        "micro_batch": MICRO_BATCH,
        "accumulation": ACCUMULATION,
    }
    yield "ddp", Plan(backend="ddp", mesh=Mesh(replicate=WORLD), **common)
    yield "fsdp2", Plan(backend="fsdp2", mesh=Mesh(shard=WORLD), **common)
    for stage in (1, 2, 3):
        yield (
            f"zero{stage}",
            Plan(
                backend="deepspeed",
                zero_stage=stage,
                mesh=Mesh(shard=WORLD),
                deepspeed=DeepSpeedOptions(bucket_elements=2_000_000),
                **common,
            ),
        )
    yield (
        "1f1b",
        Plan(
            backend="pipeline",
            mesh=Mesh(pipeline=WORLD),
            stages=Stages(schedule="1f1b", cuts=(len(UNITS) // 2,)),
            **common,
        ),
    )
