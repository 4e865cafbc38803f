"""Training with Horovod's DistributedOptimizer."""

from __future__ import annotations

import importlib
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.backends.engine import AbstractEngine, Job, Update
from bigmodel.backends.horovod.distributed_optimizer import DistributedOptimizerFactory
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.state_files import load_state, save_state
from bigmodel.backends.updating import Updater
from bigmodel.backends.whole_model import AbstractWholeModelEngine
from bigmodel.errors import MissingDependencyError, Violation, WorldError
from bigmodel.observe.blocks import get_blocks


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank."""
    return HorovodEngine(job)


@final
class HorovodEngine(AbstractWholeModelEngine):
    """All weights and optimizer states on every rank; Horovod averages gradients.

    Gradients of the micro-batches add up locally, and travel while the last backward
    goes on. They are waited for before the norm is taken: the norm of a rank's own
    gradients would clip every rank by another factor.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        plan = job.plan
        self._hvd = hvd = _import_horovod()
        hvd.init()
        if hvd.size() != plan.world:
            raise WorldError(
                Violation(
                    field="hvd.size()",
                    got=hvd.size(),
                    rule=f"the plan is for {plan.world} processes",
                    cure="start them with horovodrun (bigmodel export PLAN --to "
                    "horovod writes the command), or with bigmodel run on one machine",
                )
            )
        self._model = model = job.model.to(job.device)
        apply_recompute(get_blocks(model, plan.units), plan)
        factory = DistributedOptimizerFactory(job.optimizer, hvd, plan)
        self._updater = Updater(model, factory, plan, job.clip_norm)
        self._broadcast_weights()

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Horovod's optimizer, which is of the user's class."""
        return self._updater.optimizer

    def begin(self, *, last: bool) -> None:
        """Do nothing: Horovod counts backwards by itself."""

    def call(self, *positional: Any, **named: Any) -> Any:
        """Call the model."""
        return self._model(*positional, **named)

    def backward(self, loss: Tensor) -> None:
        """Run backward; in the last one of a step gradients begin to travel."""
        self._updater.scale.scale(loss).backward()

    def update(self) -> Update:
        """Wait for the gradients, clip, step and drop them."""
        optimizer: Any = self._updater.optimizer
        if optimizer is None:
            return self._updater.update()
        if self._plan.world > 1:
            # By gloo, which gives up after the job's time-out. Horovod would wait for a
            # silent rank for ever: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS did nothing in
            # 0.28.1. Once all are here, all gradients are on their way.
            dist.all_reduce(torch.zeros(1))
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            return self._updater.update()

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights."""
        if self._hvd.rank():
            return {}
        return {
            name: value.detach().cpu().clone()
            for name, value in self._model.state_dict().items()
            if isinstance(value, Tensor)
        }

    def save(self, folder: str) -> None:
        """Write weights and optimizer states."""
        optimizer: Any = self._updater.optimizer
        if optimizer is None:
            save_state(folder, self._model, self._updater)
            return
        # torch makes states that are missing by a step, which must not wait.
        with optimizer.skip_synchronize():
            save_state(folder, self._model, self._updater)

    def load(self, folder: str) -> None:
        """Read what `save` wrote; all ranks then get what rank 0 read."""
        optimizer: Any = self._updater.optimizer
        if optimizer is None:
            load_state(folder, self._model, self._updater)
        else:
            with optimizer.skip_synchronize():
                load_state(folder, self._model, self._updater)
        self._broadcast_weights()
        # Not when the engine is made: a fresh optimizer has no states, and Horovod
        # would make them by a step, in which weight decay moves the weights.
        if optimizer is not None and optimizer.state:
            self._hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def _broadcast_weights(self) -> None:
        # Tied weights once; not the empty ones, which Horovod cannot send.
        tensors = {
            name: value.detach()
            for name, value in (
                *self._model.named_parameters(),
                *self._model.named_buffers(),
            )
            if value.numel()
        }
        self._hvd.broadcast_parameters(tensors, root_rank=0)


def _import_horovod() -> Any:
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise MissingDependencyError(
            "horovod.torch",
            "",
            "backend 'horovod'",
            cure=f"importing it says: {error}; release 0.28.1 does not build against "
            "torch 2.13 as it is: build its main branch (docs/horovod.md says how), or "
            "use backend 'ddp', which averages gradients in the same way",
        ) from error
