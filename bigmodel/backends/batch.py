"""Batches: counting their samples, splitting and moving them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bigmodel.errors import UsageError


def num_samples(batch: Any) -> int:
    """Return how many samples a batch holds: the size of dim 0 of all its tensors.

    Raises:
        UsageError: The batch holds no tensor, or its tensors disagree.
    """
    sizes = dict(_tensors(batch))
    if not sizes:
        raise UsageError(
            f"a batch of type {type(batch).__name__} holds no tensor; "
            "a batch is a tensor, or a tuple, list or dict of tensors"
        )
    for path, tensor in sizes.items():
        if tensor.dim() == 0:
            raise UsageError(
                f"{path} is a tensor without dimensions; dim 0 of every tensor in a "
                "batch is the samples: give it one value a sample"
            )
    counts = {path: tensor.shape[0] for path, tensor in sizes.items()}
    first, count = next(iter(counts.items()))
    for path, other in counts.items():
        if other != count:
            raise UsageError(
                f"{first} has {count} samples and {path} has {other}; dim 0 of every "
                "tensor in a batch is the samples and must be equal"
            )
    return count


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch into equal parts along its samples.

    What is no tensor (a number, a string, None) is given to every part. The parts are
    views of the batch.

    Raises:
        UsageError: The samples do not divide by `parts`.
    """
    count = num_samples(batch)
    if count % parts:
        raise UsageError(
            f"a batch of {count} samples does not divide into {parts} equal parts"
        )
    leaves, structure = pytree.tree_flatten(_plain(batch))
    pieces = [
        leaf.split(count // parts) if isinstance(leaf, Tensor) else (leaf,) * parts
        for leaf in leaves
    ]
    return [
        pytree.tree_unflatten([piece[index] for piece in pieces], structure)
        for index in range(parts)
    ]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on the device."""
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf.to(device, non_blocking=True), _plain(batch)
    )


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating-point tensors in another dtype."""
    return pytree.tree_map_only(
        Tensor,
        lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf,
        batch,
    )


def _plain(batch: Any) -> Any:
    # The tokenizers' BatchEncoding is a mapping that pytree takes for a leaf.
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return dict(batch)
    return batch


def _tensors(batch: Any) -> list[tuple[str, Tensor]]:
    pairs, _ = pytree.tree_flatten_with_path(_plain(batch))
    return [
        (f"batch{pytree.keystr(path)}", leaf)
        for path, leaf in pairs
        if isinstance(leaf, Tensor)
    ]
