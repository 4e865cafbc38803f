"""Models and batches without memory: the same structure on fake tensors.

Nothing that the user passed is moved or changed: a module is copied, and its parameters
and buffers are replaced by fake ones before the copy could read them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from bigmodel.errors import TracingError


def fake_module(
    source: nn.Module | Callable[[], nn.Module],
    mode: FakeTensorMode,
    weight_dtype: torch.dtype | None,
) -> nn.Module:
    """Return a copy of a module, or what a factory builds, on fake tensors.

    Args:
        source: A module, left as it is, or a factory without arguments.
        mode: The fake mode that owns the tensors.
        weight_dtype: Element type for floating-point parameters; None keeps theirs.

    Raises:
        TracingError: The module cannot be copied, or the factory fails or returns
            something else.
    """
    if not isinstance(source, nn.Module):
        source = _build(source, mode)
    memo: dict[int, Any] = {}
    for tensor in (*source.parameters(), *source.buffers()):
        memo[id(tensor)] = _fake_weight(tensor, mode, weight_dtype)
    try:
        return copy.deepcopy(source, memo)
    except Exception as error:
        raise TracingError(
            f"{type(source).__name__} cannot be copied for tracing "
            f"({type(error).__name__}: {error}); pass a factory instead, such as "
            f"lambda: {type(source).__name__}(...)"
        ) from error


def _build(factory: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """Run a factory, without memory if it can be.

    Some factories read the values of small tensors (a schedule of dropout rates) or
    load weights. On the meta device explicit CPU tensors stay real, which is enough for
    the former; the latter can only be run as they are.
    """
    module: Any = None
    for context in (mode, torch.device("meta"), contextlib.nullcontext()):
        try:
            with context:
                module = factory()
            break
        except Exception as error:
            failure = error
    else:
        raise TracingError(
            f"the model factory failed: {type(failure).__name__}: {failure}; "
            "it must run as it is, or better on fake tensors, without reading values"
        ) from failure
    if not isinstance(module, nn.Module):
        raise TracingError(
            f"the model factory returned {type(module).__name__}; "
            "it must return a torch.nn.Module"
        )
    return module


def _fake_weight(
    tensor: torch.Tensor, mode: FakeTensorMode, weight_dtype: torch.dtype | None
) -> torch.Tensor:
    is_weight = isinstance(tensor, nn.Parameter)
    dtype = tensor.dtype
    if weight_dtype is not None and is_weight and dtype.is_floating_point:
        dtype = weight_dtype
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    if is_weight:
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def batch_size(batch: Any) -> int:
    """Return the samples of a batch: the first dimension of its first tensor.

    Raises:
        TracingError: The batch holds no tensor with a dimension.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    raise TracingError(
        f"the sample batch is {type(batch).__name__} and holds no tensor with a batch "
        "dimension; pass a tensor, or a tuple, list or dict of tensors whose first "
        "dimension is the samples"
    )


def fake_batch(batch: Any, samples: int, mode: FakeTensorMode) -> Any:
    """Return the batch on fake tensors, with another number of samples."""
    size = batch_size(batch)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        if shape and shape[0] == size:
            shape[0] = samples
        with mode:
            return torch.empty(
                shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad
            )

    return tree_map(fake, batch)
