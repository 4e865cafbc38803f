"""Wrapping a model or a stage in DistributedDataParallel as a plan says."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from bigmodel.backends.fp32_sums import Fp32Sums, Hook
from bigmodel.errors import InvalidPlanError, Violation
from bigmodel.plans import DdpOptions
from bigmodel.units import MIB

_HOOKS: dict[str, Hook] = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook,
}


def wrap(
    module: nn.Module,
    options: DdpOptions,
    process_group: dist.ProcessGroup | None = None,
    sums: Fp32Sums | None = None,
) -> tuple[DistributedDataParallel, PowerSGDState | None]:
    """Return the module in DDP, and the state of its communication hook if it has one.

    Args:
        module: On its device, with something to train.
        options: Those of the plan.
        process_group: The replicas; None: all ranks.
        sums: Where gradients add up during backward; None: with their parameters.
    """
    caps: dict[str, Any] = {"bucket_cap_mb": options.bucket_megabytes}
    if options.first_bucket_megabytes is not None:
        _check_first_bucket(options)
        first = options.first_bucket_megabytes
        caps = {"bucket_cap_mb_list": [first, options.bucket_megabytes]}
    wrapped = DistributedDataParallel(
        module,
        process_group=process_group,
        gradient_as_bucket_view=options.gradient_views,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused,
        **caps,
    )
    state: PowerSGDState | None = None
    if options.hook == "powersgd":
        _check_one_bucket(module, options)
        state = PowerSGDState(
            process_group,
            matrix_approximation_rank=options.powersgd_rank,
            start_powerSGD_iter=options.powersgd_start,
        )
    hook = _HOOKS[options.hook]
    if sums is not None:
        sums.average_by(wrapped, state or process_group, hook)
    elif options.hook != "none":
        wrapped.register_comm_hook(state or process_group, hook)
    return wrapped, state


def _check_first_bucket(options: DdpOptions) -> None:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if "bucket_cap_mb_list" not in known:
        raise InvalidPlanError(
            Violation(
                field="ddp.first_bucket_megabytes",
                got=options.first_bucket_megabytes,
                rule=f"torch {torch.__version__} has one cap for all buckets",
                cure="leave it None, or use torch 2.13",
            )
        )


def _check_one_bucket(module: nn.Module, options: DdpOptions) -> None:
    """Refuse several buckets under gloo.

    PowerSGD starts its second all-reduce in the callback of the first. gloo runs the
    callbacks of several buckets in no common order, and mixed up ranks abort.
    """
    params = [value for value in module.parameters() if value.requires_grad]
    if any(value.device.type != "cpu" for value in params):
        return
    needed = sum(value.numel() * value.element_size() for value in params) / MIB
    if needed > options.bucket_megabytes:
        raise InvalidPlanError(
            Violation(
                field="ddp.bucket_megabytes",
                got=options.bucket_megabytes,
                rule=f"on CPUs PowerSGD needs all gradients ({needed:.1f} MiB) in one "
                "bucket, because gloo starts the second half of its buckets in no "
                "common order",
                cure=f"use {needed:.0f} or more, or hook fp16",
            )
        )
