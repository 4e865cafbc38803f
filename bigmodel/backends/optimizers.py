"""Building the optimizer over whatever an engine trains in place of the model's own.

An engine replaces parameters: by shards, by fp32 copies, by those of one stage. The
user's optimizer is therefore built late, over the parameters that take a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bigmodel.backends.engine import OptimizerFactory


class NamedOptimizerFactory(ABC):
    """A factory that must know the parameters by name, to put them into groups."""

    @abstractmethod
    def __call__(self, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer over these parameters, a part of the model or all."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name; tied ones once."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def build_optimizer(
    factory: OptimizerFactory, params: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """Return the user's optimizer over the parameters that have these names."""
    if isinstance(factory, NamedOptimizerFactory):
        return factory(params)
    return factory(list(params.values()))
