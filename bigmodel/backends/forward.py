"""From a micro-batch to the model's output, and from there to the loss.

What of a batch the model sees:

    batch             without a loss function     with a loss function
    tensor            model(batch)                model(batch)
    (a, b, c)         model(a, b, c)              model(a, b); c is the target
    (a,)              model(a)                    model(a)
    {"x": a, ...}     model(x=a, ...)             the same, but for `labels`, `target`
                                                  and `targets` where the model's
                                                  forward does not name them

The loss function is always given the whole batch, and outputs in fp32: a cross-entropy
over thousands of half-precision logits would lose what training lives on. A forward
with `use_cache` (models of transformers) is told not to keep keys and values for
generation, unless the batch says otherwise: they cost memory, and recomputation would
write them twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bigmodel.backends.batch import num_samples as num_samples
from bigmodel.backends.batch import split as split
from bigmodel.backends.engine import Batch, LossFunction, LossShare
from bigmodel.errors import UsageError

TARGET_KEYS = ("labels", "target", "targets")
"""Entries of a dict batch that may be meant for the loss function alone."""


def model_inputs(
    model: nn.Module, batch: Batch, loss: LossFunction | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that the model is called with.

    Args:
        model: The user's module, whose forward says which keywords it takes; not a
            wrapper around it.
        batch: The micro-batch.
        loss: The user's loss function, if any.
    """
    accepted = inspect.signature(model.forward).parameters
    named: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    if isinstance(batch, Mapping):
        named |= batch
        if loss is not None:
            for key in TARGET_KEYS:
                if key not in accepted:
                    named.pop(key, None)
        return (), named
    if isinstance(batch, (tuple, list)):
        positional = tuple(batch)
        if loss is not None and len(positional) > 1:
            positional = positional[:-1]
        return positional, named
    return (batch,), named


def call_model(model: nn.Module, batch: Batch, loss: LossFunction | None = None) -> Any:
    """Run the model on a micro-batch; the table above says what it is given."""
    positional, named = model_inputs(model, batch, loss)
    return model(*positional, **named)


def compute_loss(
    model: nn.Module, output: Any, batch: Batch, loss: LossFunction | None
) -> Tensor:
    """Return the mean loss of a micro-batch, a tensor without dimensions.

    With a loss function it is `loss(output, batch)`. Without one it is looked for in
    the output: `output.loss`, `output["loss"]`, the output itself when it has no
    dimensions, or the first such tensor of a tuple.

    Raises:
        UsageError: There is no such tensor.
    """
    if loss is not None:
        value = loss(_in_fp32(output), batch)
        if not isinstance(value, Tensor) or value.dim():
            raise UsageError(
                f"the loss function returned {_describe(value)}; it must return the "
                "mean loss of the micro-batch as a tensor without dimensions: "
                "end it with .mean()"
            )
        return value
    value = _find_loss(output)
    if value is None:
        raise UsageError(
            f"{type(model).__name__} returned {_describe(output)}, which holds no "
            "loss; either give a loss function, "
            "prepare(..., loss=lambda output, batch: ...), or put into the batch what "
            "makes the model return its loss (labels, for models of transformers)"
        )
    return value


def weigh(loss: Tensor, share: LossShare) -> Tensor:
    """Return a mean loss times its share; nothing, where it is no number and weighs 0.

    A mean over no targets is 0 / 0.

    Raises:
        UsageError: The share is the number 0, because nothing with targets could be run
            in this micro-batch's place, and the loss is no number.
    """
    if isinstance(share, Tensor):
        loss = torch.where(share > 0, loss, 0.0)
    elif not share and not loss.isfinite():
        raise UsageError(
            f"the loss of micro-batches without any target is {loss.item()}, and no "
            "other ones have come to this rank yet, which could be run in their place: "
            "let the first window hold targets on every rank, or divide by "
            "max(count, 1) in the loss function"
        )
    return loss * share


def _in_fp32(output: Any) -> Any:
    """Return an output whose own half-precision tensors are fp32.

    Those of tuples within it (hidden states, caches) stay as they are.
    """
    if isinstance(output, Tensor):
        half = output.dtype in (torch.bfloat16, torch.float16)
        return output.float() if half else output
    if isinstance(output, Mapping):
        # A copy, so that classes of transformers keep their attributes.
        result: Any = copy(output)
        for name, value in output.items():
            if isinstance(value, Tensor):
                result[name] = _in_fp32(value)
        return result
    if type(output) in (tuple, list):
        return type(output)(
            _in_fp32(value) if isinstance(value, Tensor) else value for value in output
        )
    if is_dataclass(output) and not isinstance(output, type):
        values = {field.name: getattr(output, field.name) for field in fields(output)}
        changed = {
            name: _in_fp32(value)
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        return replace(output, **changed)
    return output


def _find_loss(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        candidates = [output.get("loss")]
    elif isinstance(output, (tuple, list)):
        # A named tuple may have a field `loss`.
        candidates = [getattr(output, "loss", None), *output]
    else:
        candidates = [output, getattr(output, "loss", None)]
    for value in candidates:
        if isinstance(value, Tensor) and value.dim() == 0:
            return value
    return None


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, value))}"
    return f"a {type(value).__name__}"
