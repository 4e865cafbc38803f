"""Training with DistributedDataParallel, or in one process without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bigmodel.backends.compiling import apply_compile
from bigmodel.backends.ddp.hook_files import load_hook, save_hook
from bigmodel.backends.ddp.sharded_optimizer import ShardedOptimizerFactory
from bigmodel.backends.ddp.unused import check_all_used
from bigmodel.backends.ddp_wrapping import wrap
from bigmodel.backends.engine import AbstractEngine, Job, Update
from bigmodel.backends.precision import cast_inputs
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.state_files import load_state, save_state
from bigmodel.backends.updating import Updater
from bigmodel.backends.whole_model import AbstractWholeModelEngine
from bigmodel.observe.blocks import get_blocks


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank."""
    return DdpEngine(job)


@final
class DdpEngine(AbstractWholeModelEngine):
    """All weights and optimizer states on every rank; gradients are averaged.

    Gradients of the micro-batches add up locally, in fp32 whatever the weights are, and
    are averaged over the ranks during the backward of the last one.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        plan = job.plan
        self._model = model = job.model.to(job.device)
        blocks = get_blocks(model, plan.units)
        apply_compile(blocks or {"": model}, plan, job.device)
        apply_recompute(blocks, plan)
        factory = job.optimizer
        if plan.zero_stage:
            factory = ShardedOptimizerFactory(factory)
        self._updater = Updater(model, factory, plan, job.clip_norm)
        if isinstance(self._updater.optimizer, ZeroRedundancyOptimizer):
            self._updater.local_optimizer = self._updater.optimizer.optim
        self._wrapped: DistributedDataParallel | None = None
        self._hook: PowerSGDState | None = None
        if plan.world > 1:
            sums = self._updater.sums
            self._wrapped, self._hook = wrap(model, plan.ddp, sums=sums)
        self._synchronises = True
        self._stepped = False

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer, over the masters where there are any."""
        return self._updater.optimizer

    def begin(self, *, last: bool) -> None:
        """Let gradients add up locally, as under `no_sync`, until the last backward."""
        if self._wrapped is not None:
            self._wrapped.require_backward_grad_sync = last
        self._synchronises = last

    def call(self, *positional: Any, **named: Any) -> Any:
        """Call the model through its wrapper."""
        return self._call(self._wrapped or self._model, positional, named)

    def evaluation_call(self, *positional: Any, **named: Any) -> Any:
        """Call the model itself: no rank waits for another."""
        return self._call(self._model, positional, named)

    def backward(self, loss: Tensor) -> None:
        """Run backward, which averages over the ranks if `begin` said so."""
        self._updater.scale.scale(loss).backward()
        if self._wrapped is not None and self._synchronises:
            first = not self._stepped
            check_all_used(self._wrapped, self._updater.weights, first=first)

    def update(self) -> Update:
        """Clip, step and drop the gradients."""
        self._stepped = True
        return self._updater.update()

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights, in fp32 where there are masters."""
        if self._plan.world > 1 and dist.get_rank():
            return {}
        masters: Mapping[int, Tensor] = {}
        if self._updater.masters is not None:
            pairs = self._updater.masters.named()
            masters = {id(self._updater.weights[n]): pairs[n] for n in pairs}
        return {
            name: masters.get(id(value), value).detach().cpu().clone()
            for name, value in self._model.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }

    def save(self, folder: str) -> None:
        """Write weights and optimizer states."""
        save_state(folder, self._model, self._updater)
        if self._hook is not None:
            save_hook(folder, self._hook)

    def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        load_state(folder, self._model, self._updater)
        if self._hook is not None:
            load_hook(folder, self._hook)

    def _call(self, callee: nn.Module, positional: Any, named: Any) -> Any:
        positional, named = cast_inputs(self._plan, (positional, named))
        return callee(*positional, **named)
