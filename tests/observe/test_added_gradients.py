"""Gradients that meet: autograd adds to the first one, if nobody else holds it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from bigmodel.plans import Plan
from tests.observe.one_cpu import peaks


class Sliced(nn.Module):
    """Each slice gives a whole gradient, and all of them add up to one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return sum(hidden[:, index].tanh() for index in range(6))


class Held(nn.Module):
    """One gradient goes to both terms, and the other one is still to be used."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = hidden * 2
        kept = hidden.tanh()
        return (hidden + first) * kept


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 8, 96), torch.randn(samples)


def loss(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return (output * output).mean()


@pytest.mark.parametrize("kind", [Sliced, Held])
def test_added_gradients_are_predicted_as_they_are_measured(kind):
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(96, 96), kind())

    plan = Plan(backend="ddp", micro_batch=64, precision="fp32", optimizer="sgd")
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    predicted, measured = peaks(model, batch, loss, optimizer, plan)
    assert predicted == pytest.approx(measured, rel=0.001)
