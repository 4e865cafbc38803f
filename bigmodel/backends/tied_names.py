"""Tied parameters by their names, where a rank holds only some of the names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from bigmodel.backends.engine import OptimizerFactory
from bigmodel.backends.optimizers import NamedOptimizerFactory, build_optimizer


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of every parameter that has several; call it before cutting."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return tuple(tuple(several) for several in names.values() if len(several) > 1)


def first_names(tied: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    """Return the first name of every tied parameter by each of its names."""
    return {name: names[0] for names in tied for name in names}


def under_first_names(
    factory: OptimizerFactory, first: Mapping[str, str]
) -> NamedOptimizerFactory:
    """Return a factory that knows tied parameters by their first name.

    That is the name under which the whole model lists them; the stage of the head may
    have them under another.
    """
    return _FirstNames(factory, first)


@final
class _FirstNames(NamedOptimizerFactory):
    def __init__(self, factory: OptimizerFactory, first: Mapping[str, str]) -> None:
        self._factory = factory
        self._first = first

    def __call__(self, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        renamed = {self._first.get(name, name): value for name, value in params.items()}
        return build_optimizer(self._factory, renamed)
