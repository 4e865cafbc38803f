"""Loading DeepSpeed, and ending what it keeps from one engine to the next."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from bigmodel.errors import MissingDependencyError


def import_deepspeed(device: torch.device) -> Any:
    """Return the library, kept from compiling what it does not need on CPUs."""
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops import __compatible_ops__ as compatible
    except ImportError:
        raise MissingDependencyError(
            "deepspeed", "deepspeed", "a plan of DeepSpeed"
        ) from None
    # DeepSpeed calls collectives by names that torch 2.13 has deprecated, and every
    # call of stage 3 would say so again.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
    )
    if device.type == "cpu":
        # The shared-memory collective would be compiled at first start, for minutes,
        # and a process killed meanwhile leaves a lock that later ones wait for.
        compatible["deepspeed_shm_comm"] = False
        # It asks oneDNN, while torch has float16 operators of its own, only slower.
        accelerator: Any = get_accelerator()
        accelerator.is_fp16_supported = lambda: True
    _forget_groups()
    return deepspeed


def _forget_groups() -> None:
    # They are global, and an engine would take over those of one before it: second
    # shards, and the data-parallel ranks of a pipeline.
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups.mpu = None
