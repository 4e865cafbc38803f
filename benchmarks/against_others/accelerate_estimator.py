"""What `accelerate estimate-memory` prints in its column "Training using Adam".

Source: `accelerate/commands/estimate.py`. The command reads a model from the Hub, so
here are its next steps: the model made under `init_empty_weights`, that of transformers
as `AutoModel.from_config` does it, then `calculate_maximum_sizes` and the largest entry
of `estimate_training_usage`, which is what the command prints.

It counts 4 times the fp32 weights, in mixed precision twice: weights, gradients and two
Adam states. It says it is for a batch of 1 and does not count activations; it knows of
no sharding and no recomputation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from torch import nn
from transformers import AutoModel, PreTrainedModel

from benchmarks.against_others.estimator import Estimator, Prediction
from benchmarks.memory_accuracy.cases import MODELS, Case

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "autocast": "bfloat16"}
"""Precision of a plan to what accelerate calls it. Its 16-bit formats are mixed."""


def training_bytes(make: Callable[[], nn.Module], precision: str) -> int:
    """Return the bytes of training with Adam, as the command prints them.

    Args:
        make: Makes the model.
        precision: Of the plan.
    """
    with init_empty_weights():
        module = make()
        if isinstance(module, PreTrainedModel):
            # Tied weights come apart under init_empty_weights; the command's model,
            # the one without a head, has none.
            module = AutoModel.from_config(module.config, dtype=torch.float32)
    size, _ = calculate_maximum_sizes(module)
    return max(estimate_training_usage(size, _DTYPES[precision]).values())


def estimate(case: Case) -> Prediction:
    make, _, _ = MODELS[case.model]
    return Prediction(
        allocated=training_bytes(make, case.plan.precision),
        outside="sharded states" if case.plan.mesh.shard > 1 else "",
    )


ACCELERATE = Estimator(
    name="accelerate",
    counts="weights, gradients, Adam states, all on every rank; no activations",
    estimate=estimate,
)
