"""What PowerSGD keeps from step to step, in a file for every rank.

Every rank has missed something else of the gradients, so the files differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

_KEPT = ("error_dict", "p_memory_dict", "q_memory_dict", "iter")


def save_hook(folder: str, state: PowerSGDState) -> None:
    """Write the state of this rank."""
    torch.save({name: getattr(state, name) for name in _KEPT}, _path(folder))


def load_hook(folder: str, state: PowerSGDState) -> None:
    """Read what `save_hook` wrote on this rank.

    A checkpoint of another plan has nothing for it: then the hook begins anew.
    """
    if not _path(folder).is_file():
        return
    for name, value in torch.load(_path(folder), weights_only=True).items():
        setattr(state, name, value)


def _path(folder: str) -> Path:
    return Path(folder) / f"powersgd_rank_{dist.get_rank()}.pt"
