"""One optimizer step: unscale, clip, step, drop the gradients; alike for all engines.

An engine decides over which parameters: the model's own, fp32 copies of them, shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigmodel.backends.engine import OptimizerFactory, Update
from bigmodel.backends.fp32_sums import Fp32Sums
from bigmodel.backends.loss_scale import LossScale
from bigmodel.backends.optimizers import build_optimizer, trainable
from bigmodel.backends.precision import MasterWeights, cast_weights
from bigmodel.plans import Plan

Clip = Callable[[dict[str, nn.Parameter], float], Tensor]
"""From parameters and the largest norm to the norm before clipping."""


@final
class Updater:
    """The optimizer of one rank, with masters and loss scale where the plan has them.

    With masters the model's weights are turned into the plan's type in place.

    Args:
        model: Already on its device and in its shards.
        factory: Builds the optimizer over what is trained.
        plan: Says the number format.
        clip_norm: Largest global norm of the gradients; None: no clipping.
        clip: Clips by the norm over all ranks; None: what this process sees is all.
        drop_gradients: Ends the gradients of the model; None: sets them to None.
        own_masters: Whether the masters are kept here; False where the library that
            shards the model keeps its weights in fp32.
        several_backwards: Whether every micro-batch has a backward of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        factory: OptimizerFactory,
        plan: Plan,
        clip_norm: float | None,
        *,
        clip: Clip | None = None,
        drop_gradients: Callable[[], None] | None = None,
        own_masters: bool = True,
        several_backwards: bool = True,
    ) -> None:
        form = plan.number_format
        self._model = model
        self._clip_norm = clip_norm
        self._clip = clip or clip_by_norm
        self._drop_gradients = drop_gradients
        self.scale = LossScale(enabled=form.scaled)
        self.weights = trainable(model)
        """The trained parameters that compute, by name."""
        self.masters: MasterWeights | None = None
        """fp32 copies of them, where there are any."""
        self.params = self.weights
        """The parameters that take the step, by name."""
        self.optimizer: torch.optim.Optimizer | None = None
        """None where nothing is trained, as on a pipeline stage of frozen layers."""
        if form.masters and own_masters:
            if self.weights:
                sums = several_backwards and plan.accumulation > 1
                self.masters = MasterWeights(factory, self.weights, sums=sums)
                self.params = self.masters.named()
                self.optimizer = self.masters.optimizer
            cast_weights(model, getattr(torch, form.weights))
        elif self.weights:
            self.optimizer = build_optimizer(factory, self.weights)
        self.sums: Fp32Sums | None = None
        """Where gradients add up during backward; None: with their parameters."""
        if self.masters is not None and self.masters.sums.during_backward:
            self.sums = self.masters.sums
        self.local_optimizer = self.optimizer
        """Holds this rank's states: the same, unless `optimizer` wraps another one."""

    def update(self) -> Update:
        """Unscale, clip, step, and drop the gradients."""
        if self.masters is not None:
            self.masters.gather_gradients()
        finite = self.scale.unscale(self.params)
        norm: Tensor | None = None
        if finite and self._clip_norm is not None:
            norm = self._clip(self.params, self._clip_norm)
        if finite and self.optimizer is not None:
            self.optimizer.step()
            if self.masters is not None:
                self.masters.scatter_weights()
        if self.masters is not None:
            self.masters.drop_gradients()
        if self._drop_gradients is not None:
            self._drop_gradients()
        else:
            # Not the optimizer's: a factory may have left parameters out.
            self._model.zero_grad(set_to_none=True)
        return Update(grad_norm=norm, skipped=not finite)


def clip_by_norm(params: dict[str, nn.Parameter], limit: float) -> Tensor:
    """Clip gradients that are whole, or shards that know their group."""
    norm = torch.nn.utils.clip_grad_norm_(params.values(), limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
