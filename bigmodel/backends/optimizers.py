"""Building the optimizer over whatever an engine trains in place of the model's own.

An engine replaces parameters: by shards, by fp32 copies, by those of one stage. The
user's optimizer is therefore built late, over the parameters that take a step.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bigmodel.backends.engine import OptimizerFactory
from bigmodel.errors import UsageError


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


def rebuild(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings over other groups.

    Raises:
        UsageError: The class cannot be built from its settings.
    """
    kind = type(optimizer)
    # AdamW keeps a default that only its base class takes.
    accepted = inspect.signature(kind.__init__).parameters
    settings = {
        name: value for name, value in optimizer.defaults.items() if name in accepted
    }
    try:
        return kind(groups, **settings)
    except TypeError as error:
        raise UsageError(
            f"{kind.__name__} cannot be built again from its settings ({error}); give "
            f"a factory instead: lambda params: {kind.__name__}(params, ...)"
        ) from error
