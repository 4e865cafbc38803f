"""What ZeRO-Infinity keeps on a disk, and the buffers that it passes through. Pure.

Source: deepspeed 0.19, `runtime/swap_tensor/{utils,optimizer_utils,
partitioned_param_swapper}.py` and `runtime/zero/stage3.py`. Tensors of less than 1 MiB
stay in memory. What is larger passes through page-locked buffers in the machine's
memory, which torch's allocator knows nothing of:

    optimizer    a buffer of the largest sub-group for each tensor that a step needs:
                 masters, states, gradients
    parameters   buffers of the largest shard, for what is gathered at the moment; and
                 one of all weights of the largest sub-group, whole, through which
                 stepped shards go back (`reserve_partitioned_swap_space`)
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

SMALLEST = 1 << 20
"""Bytes from which on a tensor goes to the disk: `MIN_AIO_BYTES`, or a block."""
_ALIGNMENT = 1024
"""`AIO_ALIGNED_BYTES`, for one thread of a request."""
FEWEST_BUFFERS = 5
"""For shards of weights; DeepSpeed's own number."""


def is_swapped(elements: int, width: int) -> bool:
    """Say whether a tensor goes to the disk.

    Args:
        elements: Its number of elements.
        width: Bytes of one.
    """
    return elements * width >= SMALLEST


def aligned(elements: int, width: int) -> int:
    """Return the bytes that a tensor takes in a buffer."""
    return ceil(elements * width / _ALIGNMENT) * _ALIGNMENT


def is_split(elements: int) -> bool:
    """Say whether a gradient in fp32 has a rest that is not written with it."""
    return elements * 4 % _ALIGNMENT != 0


def state_buffers(states: int) -> int:
    """Return how many buffers a step of the optimizer needs.

    Args:
        states: Tensors that the optimizer keeps of every parameter.
    """
    return states + 2


def shard_buffers(modules: Iterable[int], embeddings: int) -> int:
    """Return how many shards of weights can be in memory at a time.

    Weights are gathered for one module at a time. Those of a module whose inputs have
    no gradient stay until the end of the backward.

    Args:
        modules: How many weights each module has by itself.
        embeddings: Weights of modules that take no gradient to their inputs.
    """
    return max(FEWEST_BUFFERS, max(modules, default=0) + embeddings)
