"""Reading a model: the public function `trace`."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from bigmodel.api.collection import collection_paused
from bigmodel.backends.batch import cast_floats
from bigmodel.backends.engine import LossFunction
from bigmodel.backends.forward import compute_loss, model_inputs
from bigmodel.backends.pipeline.cutting import why_uncuttable
from bigmodel.backends.recompute import RECOMPUTES
from bigmodel.errors import UsageError, Violation, raise_if_any
from bigmodel.models import ModelSpec
from bigmodel.observe.sources import resolve
from bigmodel.observe.target import Target
from bigmodel.observe.tracing import Reading, trace_module
from bigmodel.plans import NUMBER_FORMATS
from bigmodel.plans.training_plan import PRECISIONS, Precision


def trace(
    model: object,
    batch: Any = None,
    *,
    seq_len: int | None = None,
    precision: Precision = "bf16",
    target: Target = "cuda",
    loss: LossFunction | None = None,
) -> ModelSpec:
    """Read a model into data, without allocating it and without a GPU.

        spec = bigmodel.trace("llama-3.1-8b", seq_len=8192)
        spec = bigmodel.trace(lambda: Net(config), (inputs, targets), loss=my_loss)

    Args:
        model: A torch.nn.Module, which is left as it is; a function that makes one; a
            config of transformers; the path of a config.json; or a name such as
            `gpt2`.
        batch: A sample batch, as the training loop will give it. May be left out for
            language models and image classifiers of transformers.
        seq_len: Tokens of a sample, where `batch` is left out.
        precision: As in `Plan.precision`.
        target: Whose operators are read: `cuda` or `cpu`.
        loss: `loss(output, batch)`, where the model does not return its loss itself.

    Raises:
        UsageError: Says what is wrong with an argument and what to give instead.
        TracingError: The model cannot be run on fake tensors; says where and why.
    """
    raise_if_any(
        [
            Violation(
                field=field, got=got, rule=f"it must be one of {', '.join(known)}"
            )
            for field, got, known in (
                ("precision", precision, PRECISIONS),
                ("target", target, get_args(Target)),
            )
            if got not in known
        ],
        UsageError,
    )
    subject = resolve(model, batch, seq_len=seq_len)

    def loss_of(module: nn.Module, local: Any) -> Tensor:
        inputs = model_inputs(module, local, loss)
        form = NUMBER_FORMATS[precision]
        if form.masters:
            # As the engines do: the model's inputs, but not those of the loss.
            inputs = cast_floats(inputs, getattr(torch, form.weights))
        positional, named = inputs
        return compute_loss(module, module(*positional, **named), local, loss)

    reading = Reading(
        loss_of=loss_of,
        recompute=RECOMPUTES,
        precision=precision,
        target=target,
        name=subject.name,
        uncuttable=why_uncuttable,
        own_loss=loss is None,
        source=subject.source,
    )
    with collection_paused():
        return trace_module(subject.model, subject.batch, reading)
