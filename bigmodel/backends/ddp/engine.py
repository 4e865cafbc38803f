"""Training with DistributedDataParallel, or in one process without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigmodel.backends.engine import AbstractEngine, Batch, Job
from bigmodel.backends.evaluation import evaluating
from bigmodel.backends.forward import compute_loss, model_inputs
from bigmodel.backends.optimizers import build_optimizer, trainable
from bigmodel.backends.precision import (
    MasterWeights,
    autocast,
    cast_inputs,
    cast_weights,
)
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.state_files import load_state, save_state
from bigmodel.observe.blocks import get_blocks


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank."""
    return DdpEngine(job)


@final
class DdpEngine(AbstractEngine):
    """All weights and optimizer states on every rank; gradients are averaged.

    Gradients of the micro-batches add up locally (in bfloat16 when the plan's precision
    is `bf16`) and are averaged over the ranks during the backward of the last one.
    """

    def __init__(self, job: Job) -> None:
        self._plan = plan = job.plan
        self._loss = job.loss
        self._clip_norm = job.clip_norm
        self._device = job.device
        self._model = model = job.model.to(job.device)
        apply_recompute(get_blocks(model, plan.units), plan)
        self._params = trainable(model)
        self._masters: MasterWeights | None = None
        if plan.precision == "bf16":
            self._masters = MasterWeights(job.optimizer, self._params)
            self._optimizer = self._masters.optimizer
            cast_weights(model)
        else:
            self._optimizer = build_optimizer(job.optimizer, self._params)
        self._wrapped: DistributedDataParallel | None = None
        if plan.world > 1:
            self._wrapped = DistributedDataParallel(
                model,
                # A float is what torch multiplies; its annotation says int.
                bucket_cap_mb=plan.buckets.ddp_megabytes,  # pyright: ignore[reportArgumentType]
                gradient_as_bucket_view=plan.buckets.ddp_gradient_views,
            )

    def forward_backward(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Accumulate locally, and average over the ranks in the last backward."""
        total = torch.zeros((), device=self._device)
        last = len(micro_batches) - 1
        for index, batch in enumerate(micro_batches):
            with self._synchronising(index == last):
                loss = self._forward(batch, self._wrapped or self._model)
                (loss / len(micro_batches)).backward()
            total += loss.detach()
        return total / len(micro_batches)

    def update(self) -> Tensor | None:
        """Clip, step and drop the gradients."""
        if self._masters is not None:
            self._masters.gather_gradients()
            norm = self._clip(self._masters.parameters())
            self._masters.step()
            self._masters.scatter_weights()
            return norm
        norm = self._clip(list(self._params.values()))
        self._optimizer.step()
        # Not the optimizer's: a factory may have left parameters out.
        self._model.zero_grad(set_to_none=True)
        return norm

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss of this rank's batch; no rank waits for another."""
        with evaluating(self._model):
            return self._forward(batch, self._model).detach()

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights, in fp32 where there are masters."""
        if self._plan.world > 1 and dist.get_rank():
            return {}
        masters: Mapping[int, Tensor] = {}
        if self._masters is not None:
            pairs = zip(self._params.values(), self._masters.parameters(), strict=True)
            masters = {id(param): master for param, master in pairs}
        return {
            name: masters.get(id(value), value).detach().cpu().clone()
            for name, value in self._model.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }

    def save(self, folder: str) -> None:
        """Write weights and optimizer states."""
        save_state(folder, self._model, self._optimizer, self._masters)

    def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        load_state(folder, self._model, self._optimizer, self._masters)

    def _forward(self, batch: Batch, callee: torch.nn.Module) -> Tensor:
        with autocast(self._plan, self._device):
            positional, named = cast_inputs(
                self._plan, model_inputs(self._model, batch, self._loss)
            )
            output: Any = callee(*positional, **named)
            return compute_loss(self._model, output, batch, self._loss)

    def _synchronising(self, last: bool) -> AbstractContextManager[Any]:
        if self._wrapped is None or last:
            return nullcontext()
        return self._wrapped.no_sync()

    def _clip(self, params: list[torch.nn.Parameter]) -> Tensor | None:
        if self._clip_norm is None:
            return None
        return torch.nn.utils.clip_grad_norm_(params, self._clip_norm)
