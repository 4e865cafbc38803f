"""Training with DeepSpeed's ZeRO."""

from __future__ import annotations

import functools
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.backends.deepspeed.config import deepspeed_config
from bigmodel.backends.deepspeed.disk_folder import DiskFolder
from bigmodel.backends.deepspeed.gradients import MissingGradients, overflow_error
from bigmodel.backends.deepspeed.replaced_linear import ReplacedLinear
from bigmodel.backends.deepspeed.whole_state import WholeState
from bigmodel.backends.deepspeed_library import import_deepspeed
from bigmodel.backends.engine import AbstractEngine, Job, Update
from bigmodel.backends.optimizers import build_optimizer, trainable
from bigmodel.backends.precision import autocast, cast_inputs
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.state_files import read_files, write_files
from bigmodel.backends.whole_model import AbstractWholeModelEngine
from bigmodel.observe.blocks import get_blocks
from bigmodel.plans import Plan


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank."""
    return DeepSpeedEngine(job)


@final
class DeepSpeedEngine(AbstractWholeModelEngine):
    """ZeRO 1: optimizer states are sharded; 2: gradients too; 3: weights too.

    With precision `bf16` the fp32 masters begin at the weights rounded to bfloat16,
    because DeepSpeed makes them after it has cast the model.
    """

    def __init__(self, job: Job) -> None:
        deepspeed = import_deepspeed(job.device)
        super().__init__(job)
        plan = job.plan
        self._clip_norm = job.clip_norm
        self._last = True
        self._scaled = plan.number_format.scaled
        self._model = model = job.model
        apply_recompute(get_blocks(model, plan.units), plan)
        _autocast_inside(model, plan, job.device)
        buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
        # Stage 3 shards the model itself; before that it must be on the device.
        model.to(job.device)
        self._optimizer = build_optimizer(job.optimizer, trainable(model))
        config = deepspeed_config(plan, job.clip_norm)
        if plan.offload.uses_disk:
            self._disk = DiskFolder(plan)
            self._disk.complete(config, model, self._optimizer)
        if plan.deepspeed.find_unused:
            # All micro-batches are reduced together, as if they were one.
            config["gradient_accumulation_steps"] = 1
        if plan.zero_stage == 3:
            self._linear = ReplacedLinear()
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self._optimizer,
            config=config,
            dist_init_required=False,
        )
        self._missing = MissingGradients(self._engine, model, plan)
        self._whole = WholeState(self._engine, model, plan)
        for name, buffer in model.named_buffers():
            # Older releases cast buffers to bfloat16 too.
            if buffer.dtype != buffers[name]:
                buffer.data = buffer.data.to(buffers[name])

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer, whose parameters DeepSpeed has replaced by its own."""
        return self._optimizer

    def begin(self, *, last: bool) -> None:
        """Remember whether DeepSpeed is to reduce at the end of the window."""
        self._last = last
        self._missing.begin()

    def call(self, *positional: Any, **named: Any) -> Any:
        """Call DeepSpeed's engine, outside of autocast, of which it would warn."""
        positional, named = cast_inputs(self._plan, (positional, named))
        with torch.autocast(self._device.type, enabled=False):
            return self._engine(*positional, **named)

    def backward(self, loss: Tensor) -> None:
        """Run DeepSpeed's backward; it counts micro-batches by calls of `step`."""
        self._missing.check(loss)
        # The share of the loss is already that of its micro-batch.
        self._engine.backward(loss, scale_wrt_gas=False)
        if self._last:
            self._missing.end()
        elif not self._missing.fills:
            # Only counts: the optimizer steps at the last micro-batch, in update.
            self._engine.step()

    def update(self) -> Update:
        """Clip, step and drop the gradients, as configured."""
        try:
            self._engine.step()
        except Exception as error:
            if self._scaled and "already at minimum" in str(error):
                raise overflow_error(self._model) from error
            raise
        skipped = self._scaled and self._engine.optimizer.overflow
        if self._clip_norm is None or skipped:
            return Update(grad_norm=None, skipped=skipped)
        norm = self._engine.get_global_grad_norm()
        return Update(
            grad_norm=torch.as_tensor(norm, dtype=torch.float32, device=self._device)
        )

    def model_state(self) -> dict[str, Tensor]:
        """Gather the weights, one at a time, to rank 0."""
        first = dist.get_rank() == 0
        known: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            # Tied weights are one parameter under several names.
            if id(value) not in known:
                full = self._full(value)
                known[id(value)] = full.cpu().clone() if first else value
            state[name] = known[id(value)]
        return state if first else {}

    def save(self, folder: str) -> None:
        """Write the ranges of weights and states that this rank keeps."""
        write_files(folder, self._whole.state())

    def load(self, folder: str) -> None:
        """Read them, in whatever parts they were written."""
        state = self._whole.state()
        read_files(folder, state)
        self._whole.take_over(state)

    @torch.no_grad()
    def _full(self, value: Tensor) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        if value.requires_grad and self._plan.number_format.masters:
            master = safe_get_full_fp32_param(value)
            if master is not None:
                return master
        if self._plan.zero_stage == 3 and isinstance(value, nn.Parameter):
            with GatheredParameters([value]):
                return value.detach().clone()
        return value.detach()


def _autocast_inside(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Let the model's forward run under autocast, entered below DeepSpeed.

    DeepSpeed switches off an autocast that is on when its own forward is called.
    """
    if not plan.number_format.autocast:
        return
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast(plan, device):
            return forward(*args, **kwargs)

    model.forward = run
