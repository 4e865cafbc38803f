"""Sample batches for models whose kind says what they read.

causal-lm   input_ids, labels        int64[1, length]
masked-lm   input_ids, labels        int64[1, length]
seq2seq     input_ids, labels        int64[1, length]; the decoder reads the labels
image       pixel_values, labels     float32[1, channels, height, width], int64[1]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bigmodel.errors import UsageError, Violation
from bigmodel.models.published import SampleKind
from bigmodel.observe.config_models import positions_of

_DEFAULT_LENGTH = 2048
"""Tokens of a sample when neither the user nor the table of models names a number, or
as many as the model has positions for, whichever is less."""
_DEFAULT_IMAGE = 224


def make_batch(
    config: Any,
    kind: SampleKind,
    seq_len: int | None,
    default_length: int = _DEFAULT_LENGTH,
) -> dict[str, Tensor]:
    """Return a batch of one sample; only its shapes and types mean anything.

    Args:
        config: The config of a model of transformers.
        kind: What it reads.
        seq_len: Tokens of the sample; None: `default_length`.
        default_length: Cut to what the model has positions for.

    Raises:
        UsageError: The length is not possible for this model.
    """
    if kind == "image":
        return _image(config, seq_len)
    limit = positions_of(config)
    if seq_len is None:
        length = min(default_length, limit) if limit else default_length
    else:
        length = seq_len
        _check_length(length, limit, config.model_type)
    tokens = torch.zeros((1, length), dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _check_length(length: int, limit: int | None, model_type: str) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise UsageError(
            Violation(
                field="seq_len",
                got=length,
                rule="it must be a whole number of at least 1",
            )
        )
    if limit and length > limit:
        raise UsageError(
            Violation(
                field="seq_len",
                got=length,
                rule=f"this {model_type} model has positions for {limit} tokens",
                cure=f"use at most {limit}, or a config with more positions",
            )
        )


def _image(config: Any, seq_len: int | None) -> dict[str, Tensor]:
    if seq_len is not None:
        raise UsageError(
            Violation(
                field="seq_len",
                got=seq_len,
                rule="an image model reads no sequence",
                cure="leave it out",
            )
        )
    size = getattr(config, "image_size", None) or _DEFAULT_IMAGE
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = getattr(config, "num_channels", 3)
    return {
        "pixel_values": torch.zeros((1, channels, height, width)),
        "labels": torch.zeros((1,), dtype=torch.int64),
    }
