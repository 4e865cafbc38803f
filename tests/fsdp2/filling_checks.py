"""Values of rank 0 on all ranks, and models that only rank 0 makes for real."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.errors import UsageError
from bigmodel.observe.allocations import phase, record_phases
from tests.fsdp2.subjects import Chain, engine, mine, points, whole


def agree(module: nn.Module) -> None:
    """Fail unless all tensors are equal on all ranks, and have values."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        assert not value.is_meta, name
        here = whole(value.detach()).clone().float()
        assert torch.isfinite(here).all(), name
        first = here.clone()
        dist.broadcast(first, 0)
        assert torch.equal(here, first), name


def make(made: list[str], kind: type[nn.Module] = Chain) -> nn.Module:
    module = kind()
    made.append(next(module.parameters()).device.type)
    return module


def check_only_the_first_rank_makes_weights() -> None:
    """CFG-08: the others really hold meta tensors when the function returns."""
    made: list[str] = []
    trained = engine(partial(make, made))
    assert made == ["meta" if trained.rank else "cpu"], made
    agree(trained._engine.module)
    torch.manual_seed(0)
    expected = Chain()
    for name, value in trained._engine.module.named_parameters():
        assert torch.equal(whole(value), expected.get_parameter(name)), name


def check_ranks_with_other_seeds() -> None:
    """ZERO-13: all shards are cut from rank 0's weights, bit by bit."""
    for factory in (False, True):
        torch.manual_seed(100 + dist.get_rank())
        model = Chain()
        expected = {name: v.detach().clone() for name, v in model.named_parameters()}
        for value in expected.values():
            dist.broadcast(value, 0)
        trained = engine((lambda model=model: model) if factory else model)
        for name, value in trained._engine.module.named_parameters():
            assert torch.equal(whole(value), expected[name]), name


class WithBuffers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.arange(4), persistent=False)
        self.register_buffer("rows", torch.ones(1, 4).expand(3, 4), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))


def check_buffers() -> None:
    """ZERO-11: also those that no checkpoint holds."""
    made: list[str] = []
    trained = engine(partial(make, made, WithBuffers))
    module = trained._engine.module
    assert made == ["meta" if trained.rank else "cpu"], made
    assert module.hidden.tolist() == [0, 1, 2, 3]
    assert module.rows.tolist() == [[1.0] * 4] * 3
    agree(module)
    trained.step(mine(points(4), 2))


class TiedLate(Chain):
    """Ties two blocks after they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.blocks[2].inner.weight.note = "kept"


def check_tied_weights_survive() -> None:
    made: list[str] = []
    trained = engine(partial(make, made, TiedLate))
    module = trained._engine.module
    assert made == ["meta" if trained.rank else "cpu"], made
    trained.step(mine(points(4), 2))
    assert module.blocks[2].inner.weight is module.blocks[0].inner.weight
    agree(module)


class ReadsValues(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


class HidesTensor(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scales = {"first": torch.full((1,), 2.0)}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales["first"]


class HalfWeights(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


def check_models_that_need_real_tensors() -> None:
    """They are made for real on all ranks, and train."""
    for kind in (ReadsValues, HidesTensor, HalfWeights):
        trained = engine(kind)
        agree(trained._engine.module)
        loss = trained.step(mine(points(4), 2)).loss
        assert torch.isfinite(loss), kind


def check_ranks_with_other_models() -> None:
    """Every rank is told what differs; none waits for the others."""
    with pytest.raises(UsageError, match=r"rank 1 has another model.*blocks\.3"):
        engine(Chain(3 + dist.get_rank()))


class Wide(nn.Module):
    """Eight blocks of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def peak(source: Callable[[], nn.Module]) -> int:
    def run() -> None:
        with phase("prepare"):
            engine(source, None, units=tuple(f"blocks.{at}" for at in range(8)))

    (found,) = record_phases(run)
    return found.peak


def made_for_real() -> nn.Module:
    # An explicit device keeps the context of `meta` out.
    with torch.device("cpu"):
        return Wide()


def check_memory_of_prepare() -> None:
    """A rank above 0 holds its shards and one block, not the model."""
    size = sum(value.numel() for value in Wide().parameters()) * 4
    empty, real = peak(Wide), peak(made_for_real)
    print(f"rank {dist.get_rank()}: {empty / size:.2f} and {real / size:.2f} models")
    if dist.get_rank():
        # Half the model in shards, one block whole, one shard being cut.
        assert empty < (1 / 2 + 1.5 / 8) * size + 100_000, empty / size
        assert real > size, real / size
