"""The disk that an engine swaps to: extension, a folder of the rank, buffers."""

from __future__ import annotations

import importlib
import tempfile
import time
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.backends.deepspeed.disk import is_swapped, shard_buffers, state_buffers
from bigmodel.backends.fresh_states import make_states
from bigmodel.backends.optimizers import rebuild
from bigmodel.errors import UsageError
from bigmodel.plans import Plan

_BUILD_SECONDS = 600
"""A build takes 2 minutes on two cores."""


@final
class DiskFolder:
    """A new folder of this rank, which goes with it.

    Other jobs, and other ranks of a machine, may be given the same place.

    Args:
        plan: Keeps parameters or optimizer on a disk.

    Raises:
        UsageError: DeepSpeed's extension is missing, or the place cannot be written.
    """

    def __init__(self, plan: Plan) -> None:
        _load_extension()
        self._plan = plan
        place = Path(plan.offload.folder)
        prefix = f"bigmodel-rank{dist.get_rank()}-"
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(
                prefix=prefix, dir=place, ignore_cleanup_errors=True
            )
        except OSError as error:
            raise UsageError(
                f"rank {dist.get_rank()} cannot write to offload.folder "
                f"{plan.offload.folder!r}: {error.strerror}; name a folder on a local "
                "disk of every machine"
            ) from None

    def complete(
        self,
        config: dict[str, Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Put the folder, and buffers that fit model and optimizer, into a config."""
        zero, offload = config["zero_optimization"], self._plan.offload
        if offload.optimizer == "disk":
            zero["offload_optimizer"] |= {
                "nvme_path": self._folder.name,
                "buffer_count": state_buffers(_states(optimizer)),
            }
        if offload.parameters == "disk":
            count, largest = self._shards(model)
            zero["offload_param"] |= {
                "nvme_path": self._folder.name,
                "buffer_count": count,
                "buffer_size": largest,
            }

    def _shards(self, model: nn.Module) -> tuple[int, int]:
        """Return how many shards of weights are there at once, and the largest one."""
        ranks = self._plan.mesh.shard
        width = self._plan.number_format.weight_bytes
        threshold = self._plan.deepspeed.param_persistence_threshold
        modules, embeddings, largest = [], 0, 1
        for module in model.modules():
            sizes = [
                -(-param.numel() // ranks)
                for param in module.parameters(recurse=False)
                if param.numel() > threshold
            ]
            swapped = [size for size in sizes if is_swapped(size, width)]
            modules.append(len(swapped))
            embeddings += len(swapped) * isinstance(module, nn.Embedding)
            largest = max((largest, *swapped))
        return shard_buffers(modules, embeddings), largest


def _states(optimizer: torch.optim.Optimizer) -> int:
    """Return how many tensors an optimizer keeps of each parameter, by trying it."""
    param = nn.Parameter(torch.zeros(2))
    trial = rebuild(optimizer, [{**optimizer.param_groups[0], "params": [param]}])
    make_states(trial, [param])
    return sum(
        isinstance(value, Tensor) and value.shape == param.shape
        for value in trial.state[param].values()
    )


def _load_extension() -> None:
    """Load async_io, which DeepSpeed compiles at its first use on a machine.

    torch lets other processes wait for a build by a file, which one that was killed
    leaves behind; every later start would wait for ever.
    """
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    builder = builders.AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise UsageError(
            "offload to disk needs DeepSpeed's extension async_io, which cannot be "
            "built on this machine: install libaio with its headers (libaio-dev, "
            "libaio-devel) and a C++ compiler, or offload to cpu"
        )
    extensions: Any = importlib.import_module("torch.utils.cpp_extension")
    lock = Path(extensions._get_build_directory(builder.name, False), "lock")
    deadline = time.monotonic() + _BUILD_SECONDS
    while lock.exists():
        if time.monotonic() > deadline:
            raise UsageError(
                f"the build of DeepSpeed's extension async_io that {str(lock)!r} "
                f"belongs to has not ended in {_BUILD_SECONDS} s; if none is running, "
                "one was killed: remove that file"
            )
        time.sleep(0.2)
    builder.load(verbose=False)
