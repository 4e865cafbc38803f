"""Small models, their data and their loss, the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY = 64
LENGTH = 8
LAYERS = 4


@dataclass(frozen=True)
class Subject:
    """A model with what is needed to train it."""

    make: Callable[[], nn.Module]
    data: Callable[[int], object]
    """From a number of samples to a batch."""
    loss: Callable | None
    units: tuple[str, ...]
    elements: int
    """Parameters, about."""
    frozen: str
    """Prefix of the parameters that a case may freeze."""


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=LAYERS,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _tokens(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def _points(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return inputs, torch.randn(samples, 3, generator=generator)


def _squared_error(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch[-1])


SUBJECTS = {
    "gpt2": Subject(
        make=_gpt2,
        data=_tokens,
        loss=None,
        units=tuple(f"transformer.h.{index}" for index in range(LAYERS)),
        elements=53_000,
        frozen="transformer.h.1.",
    ),
    "mlp": Subject(
        make=_mlp,
        data=_points,
        loss=_squared_error,
        units=tuple(str(index) for index in range(5)),
        elements=435,
        frozen="2.",
    ),
}


def make_model(name: str, *, freeze: bool) -> nn.Module:
    """Return the model with the weights that every process starts from."""
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    model = subject.make()
    if freeze:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(not key.startswith(subject.frozen))
    return model


def make_optimizer(params) -> torch.optim.Optimizer:
    # Adam turns a gradient of 1e-9, which rounding leaves where the true one is zero
    # (the key bias of attention), into a whole step; a larger eps keeps it small.
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-5, weight_decay=0.1)
