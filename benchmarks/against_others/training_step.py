"""The training step that torch's trackers are shown: the one that is measured.

Model, wrapping, precision, recomputation and update are those of bigmodel's engines, so
the trackers see the very program whose peak is measured and only their counting counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bigmodel.backends.ddp_wrapping import wrap
from bigmodel.backends.engine import LossFunction
from bigmodel.backends.forward import compute_loss, model_inputs
from bigmodel.backends.precision import autocast, cast_inputs
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.sharding import shard
from bigmodel.backends.updating import Updater
from bigmodel.observe.blocks import get_blocks
from bigmodel.plans import Plan

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is trained, and how."""

    plan: Plan
    """Of backend `ddp` or `fsdp2`, with one micro-batch a step."""
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    """From samples to a batch."""
    loss: LossFunction | None
    """None: the model's output holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model that is ready to be trained on one batch."""

    subject: Subject
    module: nn.Module
    called: nn.Module
    """The module, or the DDP around it."""
    updater: Updater
    batch: Any

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer over weights, shards or masters."""
        return self.updater.optimizer

    def step(self) -> None:
        """Run forward, backward and the optimizer, and drop the gradients."""
        self._loss().backward()
        self.updater.update()

    def _loss(self) -> Tensor:
        """Return the loss; the output is let go of, as in the engines."""
        subject = self.subject
        with autocast(subject.plan, CPU):
            positional, named = model_inputs(self.module, self.batch, subject.loss)
            if subject.plan.backend == "ddp":
                # fully_shard casts them itself.
                positional, named = cast_inputs(subject.plan, (positional, named))
            output = self.called(*positional, **named)
            return compute_loss(self.module, output, self.batch, subject.loss)


def replicated(subject: Subject, *, wrapped: bool, fused: bool) -> Training:
    """Make a training with whole weights.

    Args:
        subject: What is trained.
        wrapped: Whether DDP is around it.
        fused: Whether AdamW is the fused one.
    """
    module = _make(subject)
    updater = Updater(module, _adamw(fused=fused), subject.plan, None)
    called = module
    if wrapped:
        called, _ = wrap(module, subject.plan.ddp, sums=updater.sums)
    return Training(
        subject=subject,
        module=module,
        called=called,
        updater=updater,
        batch=subject.batch(subject.plan.local_batch),
    )


def sharded(subject: Subject, mesh: DeviceMesh, *, fused: bool) -> Training:
    """Make a training with FSDP2 on a mesh."""
    module = _make(subject)
    shard(module, get_blocks(module, subject.plan.units), subject.plan, mesh)
    updater = Updater(
        module, _adamw(fused=fused), subject.plan, None, own_masters=False
    )
    return Training(
        subject=subject,
        module=module,
        called=module,
        updater=updater,
        batch=subject.batch(subject.plan.local_batch),
    )


def _make(subject: Subject) -> nn.Module:
    module = subject.make()
    apply_recompute(get_blocks(module, subject.plan.units), subject.plan)
    return module


def _adamw(*, fused: bool) -> Callable[[Any], torch.optim.Optimizer]:
    return partial(torch.optim.AdamW, lr=1e-3, fused=fused)
