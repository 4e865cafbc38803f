"""The backward in two parts: what it computes and keeps is what one backward does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.models import Gradient, Storage


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def spec():
    model = nn.Sequential(*(Block() for _ in range(4)))
    batch = (torch.randn(2, 8), torch.randn(2, 8))
    return bigmodel.trace(
        model,
        batch,
        loss=lambda output, b: nn.functional.mse_loss(output, b[1]),
        precision="fp32",
        target="cpu",
    )


def test_both_parts_compute_what_one_backward_does(spec):
    block = spec.blocks[2].phases
    whole, split = block["none"], block["split"]
    assert split.backward.flops(4) + split.weights.flops(4) == whole.backward.flops(4)
    assert split.backward.flops(4) == split.weights.flops(4) > 0
    assert split.forward == whole.forward


def test_gradients_appear_in_the_second_part_only(spec):
    split = spec.blocks[2].phases["split"]
    named = [e.param for e in split.weights.events if isinstance(e, Gradient)]
    assert sorted(named) == sorted(p.name for p in spec.blocks[2].params)
    assert split.weights.net(4, "gradient") == 4 * spec.blocks[2].elements
    assert not any(isinstance(e, Gradient) for e in split.backward.events)


def test_what_the_first_part_keeps_the_second_frees(spec):
    """Of a block between two others: what is left is what it hands on, less its own."""
    split = spec.blocks[2].phases["split"]
    tapes = (
        split.forward,
        split.backward,
        split.weights,
        split.backward_end,
        split.weights_end,
    )
    left = sum(
        event.sign * event.size.at(4)
        for tape in tapes
        for event in tape.events
        if isinstance(event, Storage) and event.kind != "gradient"
    )
    assert left == 0
    # The gradients that arrive at the norm and both layers wait for the second part.
    kept = split.backward.net(4) + split.backward_end.net(4)
    assert kept >= 4 * 4 * (8 + 32)
