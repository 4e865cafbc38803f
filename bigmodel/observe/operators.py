"""What an operator costs: FLOP and bytes, from its tensors.

FLOP of matrix products and attention are those of `torch.utils.flop_counter`, by its
own table; CPU attention and grouped products (the experts of a mixture), which that
table lacks, are counted by the same formulas.
Other operators only move memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice",
        "select", "unsqueeze", "squeeze", "alias", "detach", "as_strided", "split",
        "unbind", "split_with_sizes", "chunk", "view_as", "reshape", "empty",
        "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh",
        "narrow", "unfold", "diagonal", "resize_", "is_same_size", "_reshape_alias",
        "device",
    }
)  # fmt: skip
"""Operators that run no kernel."""

_ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)

_GROUPED = frozenset(
    {
        "_grouped_mm",
        # What transformers runs where torch's grouped product does not apply.
        "grouped_mm_fallback",
        "grouped_mm_fallback_backward",
    }
)


@dataclass(frozen=True, slots=True)
class RawOp:
    """Cost of one operator at one micro-batch."""

    kind: str
    flops: int
    counted_flops: int
    """FLOP with attention in full, as model FLOP are counted."""
    bytes_moved: int
    dtype: str


def describe_operator(
    func: Any,
    inputs: list[torch.Tensor],
    result: Any,
    args: tuple,
    kwargs: dict,
) -> RawOp | None:
    """Return what a call costs, or None when it runs no kernel."""
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    name = func._overloadpacket.__name__
    if name in _VIEWS or not (inputs or outputs):
        return None
    moved = sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))
    dtype = str((inputs or outputs)[0].dtype).removeprefix("torch.")
    base = name.removesuffix("_backward")
    if base in _ATTENTION:
        flops = _attention_flops(name, inputs)
        causal = _is_causal(func, args, kwargs)
        return RawOp("attention", flops // 2 if causal else flops, flops, moved, dtype)
    if name in _GROUPED:
        flops = _grouped_flops(name, inputs)
        return RawOp("matmul", flops, flops, moved, dtype)
    counter = flop_registry.get(func._overloadpacket)
    if counter is None:
        return RawOp("memory", 0, 0, moved, dtype)
    flops = int(counter(*args, **kwargs, out_val=result))
    return RawOp("matmul", flops, flops, moved, dtype)


def _bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor is read once, whatever its shape says.
    return min(
        tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    )


def _attention_flops(name: str, inputs: list[torch.Tensor]) -> int:
    """Two products forward, five backward (two of them recomputed): S x S x head."""
    backward = name.endswith("_backward")
    query, key = (inputs[1], inputs[2]) if backward else (inputs[0], inputs[1])
    batch, heads, length, dim = query.shape
    product = 2 * batch * heads * length * key.shape[2] * dim
    return product * (5 if backward else 2)


def _grouped_flops(name: str, inputs: list[torch.Tensor]) -> int:
    """Count every row of a ragged side once: it belongs to one group."""
    left, right = inputs[0], inputs[1]
    groups = left.shape[0] if left.dim() == 3 and right.dim() == 2 else 1
    product = 2 * left.numel() * right.shape[-1] // groups
    return 2 * product if name.endswith("_backward") else product


def _is_causal(func: Any, args: tuple, kwargs: dict) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            if argument.name in kwargs:
                return bool(kwargs[argument.name])
            return bool(args[position]) if position < len(args) else False
    return False
