"""Small models for the checks, and engines over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.plans import Mesh, Plan
from bigmodel.running.session import Engine, prepare

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Chain(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x)


def units(count: int = 3) -> tuple[str, ...]:
    return tuple(f"blocks.{index}" for index in range(count))


def chain() -> Chain:
    torch.manual_seed(3)
    return Chain()


def points(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, 4, generator=generator),
        torch.randn(samples, 2, generator=generator),
    )


def squared(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.mse_loss(output, batch[1])


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def plan(**changes: Any) -> Plan:
    base = Plan(backend="fsdp2", mesh=Mesh(shard=2), micro_batch=2, units=units())
    return replace(base, **changes)


def engine(
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Callable | None = squared,
    optimizer: Callable = sgd,
    clip_norm: float | None = None,
    **changes: Any,
) -> Engine:
    return prepare(
        plan(**changes), model or chain(), optimizer, loss, clip_norm=clip_norm
    )


def mine(batch: Any, size: int) -> Any:
    """Return this rank's part of a global batch."""
    begin = dist.get_rank() * size
    return tuple(part[begin : begin + size] for part in batch)


def expected_gradients(
    model: nn.Module, loss: Callable[[nn.Module], Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of one process."""
    loss(model).backward()
    return {
        name: value.grad
        for name, value in model.named_parameters()
        if value.grad is not None
    }


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def same_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = {
        name: whole(value.grad)
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


# torch 2.13 renamed what FSDP2 calls.
GATHER = (
    "all_gather_single"
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor")
)
REDUCE = (
    "reduce_scatter_single"
    if hasattr(dist, "reduce_scatter_single")
    else ("reduce_scatter_tensor")
)


@contextmanager
def counted(name: str) -> Iterator[list[torch.dtype]]:
    """Record the types of what a collective of torch.distributed yields, by call."""
    calls: list[torch.dtype] = []
    function = getattr(dist, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [
            value for value in (*args, *kwargs.values()) if torch.is_tensor(value)
        ]
        calls.append(tensors[0].dtype)
        return function(*args, **kwargs)

    setattr(dist, name, run)
    try:
        yield calls
    finally:
        setattr(dist, name, function)
