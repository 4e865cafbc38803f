"""ZeRO-1 of torch: every rank keeps the optimizer states of some parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from bigmodel.backends.engine import OptimizerFactory
from bigmodel.backends.optimizers import (
    NamedOptimizerFactory,
    build_optimizer,
    rebuild,
)


@final
class ShardedOptimizerFactory(NamedOptimizerFactory):
    """Builds a ZeroRedundancyOptimizer of the user's kind, with the user's groups.

    Args:
        factory: The user's factory.
    """

    def __init__(self, factory: OptimizerFactory) -> None:
        self._factory = factory

    def __call__(self, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer; all ranks call it together."""
        whole = build_optimizer(self._factory, params)

        def part(groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
            return rebuild(whole, groups)

        # Adagrad has made its states already, and `part` keeps the optimizer.
        whole.state.clear()
        # The groups as the user made them, with every setting of theirs. torch calls
        # what it takes for a class with those of this rank.
        groups = [dict(group) for group in whole.param_groups]
        return ZeroRedundancyOptimizer(groups, optimizer_class=part)  # pyright: ignore[reportArgumentType]
