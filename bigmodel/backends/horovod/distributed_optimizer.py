"""The user's optimizer as Horovod's, with the user's groups and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from bigmodel.backends.engine import OptimizerFactory
from bigmodel.backends.optimizers import NamedOptimizerFactory, build_optimizer
from bigmodel.plans import Plan


@final
class DistributedOptimizerFactory(NamedOptimizerFactory):
    """Builds an optimizer that averages gradients before it steps.

    Args:
        factory: The user's factory.
        hvd: The module `horovod.torch`, after `init`.
        plan: Says the accumulation and the compression.
    """

    def __init__(self, factory: OptimizerFactory, hvd: Any, plan: Plan) -> None:
        self._factory = factory
        self._hvd = hvd
        self._plan = plan

    def __call__(self, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer; all ranks call it together."""
        return self._hvd.DistributedOptimizer(
            build_optimizer(self._factory, params),
            named_parameters=list(params.items()),
            compression=getattr(self._hvd.Compression, self._plan.horovod.compression),
            backward_passes_per_step=self._plan.accumulation,
            op=self._hvd.Average,
        )
