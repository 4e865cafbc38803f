"""Plans, models and questions that the checks of training share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.plans import Mesh, Plan
from bigmodel.running.session import Engine
from bigmodel.running.window import Window

WORLD = 2
SGD = partial(torch.optim.SGD, lr=1.0)
PAIR = partial(Plan, backend="ddp", mesh=Mesh(replicate=WORLD))
SHARDS = partial(Plan, backend="fsdp2", mesh=Mesh(shard=WORLD))


class Scale(nn.Module):
    """w * x, beginning at w = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Items:
    """Batches in their order; a list would be a dataset."""

    def __init__(self, items: list[Tensor]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.items)


def mean_output(output: Tensor, batch) -> Tensor:
    return output.mean()


def first_rank() -> bool:
    return dist.get_rank() == 0


def mine(values: Tensor) -> Tensor:
    half = len(values) // WORLD
    return values[dist.get_rank() * half :][:half]


def whole(engine: Engine, name: str) -> float:
    values: list = [engine.state_dict().get(name)]
    dist.broadcast_object_list(values)
    return float(values[0])


def gradient(engine: Engine, batch) -> float:
    """Return d loss / d w of one step of SGD with lr 1."""
    before = whole(engine, "w")
    engine.step(batch)
    return before - whole(engine, "w")


def folder_of(case: str) -> Path:
    """Return a folder that the ranks of this launch, and its tests, share."""
    return Path(os.environ["CASES_FOLDER"]) / case


def close(got, expected: float, within: float = 1e-6) -> None:
    if not abs(float(got) - expected) <= within:
        raise AssertionError(f"{float(got)} is not {expected}")


def same(got, expected) -> None:
    if got != expected:
        raise AssertionError(f"{got!r} is not {expected!r}")


def holds(text: str, part: str) -> None:
    if part not in text:
        raise AssertionError(f"{part!r} is not in {text!r}")


def error_of(kind: type[Exception], action) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def window_of(*parts: list[float]) -> Window:
    return Window(
        micro_batches=tuple(torch.tensor(part) for part in parts),
        real=(True,) * len(parts),
    )
