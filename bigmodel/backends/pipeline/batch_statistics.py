"""BatchNorm in a pipeline: it sees one micro-batch at a time."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def warn_of_batch_norm(model: nn.Module, micro_batch: int, accumulation: int) -> None:
    """Warn of layers that normalise by the micro-batch instead of the batch.

    Args:
        model: The stages of this rank.
        micro_batch: Samples of one forward.
        accumulation: Micro-batches of a step.
    """
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    ]
    if names and accumulation > 1:
        warnings.warn(
            f"{', '.join(names)}: BatchNorm normalises by each micro-batch of "
            f"{micro_batch} samples, and its running statistics move {accumulation} "
            "times in a step; the more micro-batches, the noisier. Use GroupNorm or "
            "LayerNorm, freeze its statistics with .eval(), or use fewer, larger "
            "micro-batches",
            stacklevel=2,
        )
