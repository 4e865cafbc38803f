"""What operators take in C++ while they run, on a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.plans import Plan
from tests.observe.one_cpu import peaks


class Skipping(nn.Module):
    """Convolutions with a skip around the middle ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.down = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.last = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skip = self.first(image).relu()
        deep = self.up(self.norm(self.down(skip)).relu())
        return self.last(torch.cat([skip, deep], dim=1))


def images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, 48, 48), torch.randn(samples, 3, 48, 48)


def loss(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_convolutions_are_predicted_with_what_they_take_in_between(precision):
    plan = Plan(backend="ddp", micro_batch=4, precision=precision)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    predicted, measured = peaks(Skipping, images, loss, optimizer, plan)
    assert predicted == pytest.approx(measured, rel=0.005)


def test_workspaces_of_a_cpu_are_not_those_of_a_gpu():
    events = {
        target: bigmodel.trace(
            Skipping, images(2), precision="fp32", target=target, loss=loss
        ).before.phases["none"]
        for target in ("cpu", "cuda")
    }
    assert len(events["cuda"].forward.events) < len(events["cpu"].forward.events)
