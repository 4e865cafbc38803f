"""Faults that people met while training with other tools: right here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bigmodel.backends.recompute import recompute_fully
from bigmodel.errors import UsageError
from bigmodel.plans import Plan
from bigmodel.running.session import prepare
from tests.cases.launches import assert_check, checks_of

CHECKS = "loss_checks+data_checks+engine_checks"


@pytest.mark.parametrize("name", checks_of(CHECKS))
def test_on_two_ranks(name: str) -> None:
    assert_check(CHECKS, 2, name)


class Moody(nn.Module):
    """Returns fewer rows, or other values, with every call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = kind
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output = self.layer(x)
        if self.kind == "rows":
            return output[: len(output) - self.calls]
        return output * self.calls if self.kind == "values" else output


@pytest.mark.parametrize(
    ("kind", "what"), [("rows", "shape (7, 4)"), ("values", "values differ")]
)
def test_ac_03_a_block_that_differs_when_recomputed_is_named(kind, what):
    plan = Plan(
        backend="ddp", micro_batch=8, units=("0", "1"), recompute=("full", "full")
    )
    block = nn.Sequential(nn.Linear(4, 4), Moody(kind))
    with (
        prepare(
            plan, nn.Sequential(nn.Linear(4, 4), block), torch.optim.SGD, square
        ) as engine,
        pytest.raises(UsageError) as caught,
    ):
        engine.step(torch.randn(8, 4))
    text = str(caught.value)
    assert "1.1 (Moody)" in text
    assert what in text
    assert "unit '1'" in text


def test_ac_03_plain_blocks_pass_and_are_left_as_they_were():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
    )
    units = tuple("0123")
    results = []
    for recompute in ((), ("full",) * 4):
        plan = Plan(backend="ddp", micro_batch=8, units=units, recompute=recompute)
        with prepare(plan, copy.deepcopy(plain), torch.optim.SGD, square) as engine:
            for _ in range(2):
                engine.step(torch.ones(8, 4) * torch.arange(8)[:, None])
            results.append(engine.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def square(output: Tensor, batch) -> Tensor:
    return output.square().mean()


def test_ac_05_recompute_under_autocast():
    """A layer that is used twice: gradients equal those without recompute, bitwise."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(1)
        layer = nn.Linear(8, 8)
        block = Twice(layer)
        if recompute:
            recompute_fully(block)
        with torch.autocast("cpu", torch.bfloat16):
            loss = block(x).float().square().mean()
        loss.backward()
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))
