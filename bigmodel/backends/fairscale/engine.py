"""Training with fairscale's OSS, in DDP or in its ShardedDataParallel."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigmodel.backends.ddp_wrapping import wrap
from bigmodel.backends.engine import AbstractEngine, Job, OptimizerFactory, Update
from bigmodel.backends.optimizers import (
    NamedOptimizerFactory,
    build_optimizer,
    rebuild,
)
from bigmodel.backends.precision import cast_inputs
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.state_files import load_state, save_state
from bigmodel.backends.updating import Updater
from bigmodel.backends.whole_model import AbstractWholeModelEngine
from bigmodel.errors import MissingDependencyError
from bigmodel.observe.blocks import get_blocks

_GAIN_FILE = "adascale.json"


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank."""
    return FairscaleEngine(job)


@final
class FairscaleEngine(AbstractWholeModelEngine):
    """ZeRO 1: optimizer states are sharded; 2: gradients are sent to one rank each.

    ShardedDataParallel keeps gradients as views of its buckets. They must be zeroed by
    its own `zero_grad`: set to None, as optimizers do by default, they leave their
    bucket, which then sends what it held before.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        plan = job.plan
        oss, sharded, adascale = _import_fairscale()
        self._model = model = job.model.to(job.device)
        apply_recompute(get_blocks(model, plan.units), plan)
        shards = plan.zero_stage == 2
        self._updater = Updater(
            model,
            _OssFactory(oss, job.optimizer),
            plan,
            job.clip_norm,
            clip=self._clip if shards else None,
            drop_gradients=self._drop_gradients if shards else None,
        )
        self._optimizer: Any = self._updater.optimizer
        self._updater.local_optimizer = self._optimizer.optim
        self._gain: Any = None
        if plan.fairscale.adascale:
            self._gain = adascale(
                self._optimizer, num_gradients_to_accumulate=plan.accumulation
            )
            self._updater.optimizer = self._gain
        self._wrapped: Any
        if shards:
            self._wrapped = sharded(
                model,
                self._optimizer,
                reduce_buffer_size=plan.fairscale.reduce_buffer_elements,
                sync_models_at_startup=False,
            )
        else:
            self._wrapped, _ = wrap(model, plan.ddp)
        self._apart = contextlib.ExitStack()

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The OSS around the user's optimizer, or AdaScale around that.

        The groups are the user's; AdaScale says its `gain()`.
        """
        return self._gain or self._optimizer

    def begin(self, *, last: bool) -> None:
        """Let gradients add up locally until the last backward."""
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped.require_backward_grad_sync = last
        elif not last:
            self._apart.enter_context(self._wrapped.no_sync())

    def call(self, *positional: Any, **named: Any) -> Any:
        """Call the model through its wrapper."""
        positional, named = cast_inputs(self._plan, (positional, named))
        return self._wrapped(*positional, **named)

    def evaluation_call(self, *positional: Any, **named: Any) -> Any:
        """Call the model itself: no rank waits for another."""
        return self._model(*positional, **named)

    def backward(self, loss: Tensor) -> None:
        """Run backward, which reduces unless `begin` said that more will follow."""
        self._updater.scale.scale(loss).backward()
        self._apart.close()

    def update(self) -> Update:
        """Clip, step, broadcast what was stepped, and drop the gradients."""
        return self._updater.update()

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights, which every rank has."""
        if dist.get_rank():
            return {}
        return {
            name: value.detach().cpu().clone()
            for name, value in self._model.state_dict().items()
            if isinstance(value, Tensor)
        }

    def save(self, folder: str) -> None:
        """Write weights and the optimizer states of all ranks."""
        save_state(folder, self._model, self._updater)
        if self._gain is not None and not dist.get_rank():
            # Averages over all ranks, the same on each.
            averages = {name: list(kept) for name, kept in self._averages.items()}
            (Path(folder) / _GAIN_FILE).write_text(json.dumps(averages))

    def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        load_state(folder, self._model, self._updater)
        averages_of = Path(folder) / _GAIN_FILE
        if self._gain is not None and averages_of.is_file():
            averages = json.loads(averages_of.read_text())
            self._averages.update({k: np.array(kept) for k, kept in averages.items()})

    @property
    def _averages(self) -> dict[str, Any]:
        """What AdaScale keeps between steps, where it keeps it."""
        return self._optimizer.state["adascale"]

    def _clip(self, params: Mapping[str, nn.Parameter], limit: float) -> Tensor:
        # Each rank has the averaged gradients of its own parameters only.
        return self._optimizer.clip_grad_norm(limit)

    def _drop_gradients(self) -> None:
        self._wrapped.zero_grad(set_to_none=True)


@final
class _OssFactory(NamedOptimizerFactory):
    """Builds an OSS around an optimizer of the user's kind, with the user's groups."""

    def __init__(self, oss: Any, factory: OptimizerFactory) -> None:
        self._oss = oss
        self._factory = factory

    def __call__(self, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        whole = build_optimizer(self._factory, params)

        def part(groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
            return rebuild(whole, groups)

        groups = [dict(group) for group in whole.param_groups]
        return self._oss(groups, optim=part)


def _import_fairscale() -> tuple[Any, Any, Any]:
    with warnings.catch_warnings():
        # It imports parts of torch that have moved since its last release.
        warnings.simplefilter("ignore")
        try:
            from fairscale.nn.data_parallel import ShardedDataParallel
            from fairscale.optim.adascale import AdaScale
            from fairscale.optim.oss import OSS
        except ImportError:
            raise MissingDependencyError(
                "fairscale", "fairscale", "backend 'fairscale'"
            ) from None
    return OSS, ShardedDataParallel, AdaScale
