"""Small models of every kind that tracing must read."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(hidden)))


class Net(nn.Module):
    """Embedding, equal blocks, head; returns logits."""

    def __init__(self, depth: int, width: int = 8, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class LossNet(Net):
    """Takes labels and returns a loss."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(super().forward(tokens), (tokens, labels))


class TupleNet(Net):
    """Returns a tuple of loss and logits."""

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(tokens)
        return cross_entropy(logits, (tokens, labels)), logits


class Looking(nn.Module):
    """Reads the values of a tensor, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:  # the line that the error must name
            return self.layer(x).mean()
        return x.mean()


def cross_entropy(logits: Tensor, batch) -> Tensor:
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(length: int = 6) -> Tensor:
    return torch.zeros((1, length), dtype=torch.int64)
