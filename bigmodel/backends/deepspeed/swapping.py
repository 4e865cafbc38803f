"""Bringing what ZeRO-Infinity keeps on a disk into memory for a moment.

Source: deepspeed 0.19, `runtime/zero/stage3.py` and
`runtime/swap_tensor/partitioned_param_swapper.py`. Tensors on a disk are empty; those
that are read lie in buffers that the next ones take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from bigmodel.plans import Plan


@final
class Swapping:
    """The disk of a DeepSpeed optimizer of stage 3.

    Args:
        zero: DeepSpeed's optimizer.
        plan: The plan.
    """

    def __init__(self, zero: Any, plan: Plan) -> None:
        self._zero = zero
        self._swaps = plan.offload.optimizer == "disk"

    def has_states(self, index: int) -> bool:
        """Say whether masters and states of a sub-group are on the disk."""
        return self._swaps and self._zero._swappable_optimizer_subgroup(index)

    @contextmanager
    def states(self, index: int, *, write: bool) -> Iterator[None]:
        """Have masters and states of a sub-group in memory, wherever they are.

        Args:
            index: Of the sub-group.
            write: Whether they go back to the disk as they are at the end.
        """
        if not self.has_states(index):
            yield
            return
        self._zero._optimizer_states_and_gradient_swap_in(index)
        try:
            yield
        finally:
            if write:
                self._zero._optimizer_states_and_gradient_swap_out(index)
            else:
                self._zero._release_swap_buffers(index)


def has_weight(param: Any) -> bool:
    """Say whether the shard of a parameter is on the disk."""
    return param.ds_tensor.final_location == "nvme"


def read_weight(param: Any) -> Tensor:
    """Return the shard of a parameter: its memory, or a copy of what is on the disk."""
    if not has_weight(param):
        return param.ds_tensor.detach().view(-1)
    swapper = param.nvme_swapper
    swapper.swap_in([param], async_op=False)
    shard = param.ds_tensor.detach().view(-1).clone()
    swapper.remove_partition_and_release_buffers([param])
    return shard


@torch.no_grad()
def write_weight(param: Any, values: Tensor) -> None:
    """Write the shard of a parameter that is on the disk, all but its padding."""
    swapper = param.nvme_swapper
    swapper.swap_in([param], async_op=False)
    param.ds_tensor.view(-1)[: values.numel()] = values
    # Waits for the write, and gives the buffer back.
    swapper._swap_out([param], async_op=False)
