"""What a result depends on, read off its autograd graph."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor


def leaves_of(result: Tensor, ends: Collection[Tensor] = ()) -> set[int]:
    """Return the ids of the leaf tensors that a result depends on.

    Args:
        result: With its graph.
        ends: Tensors beyond which is not looked.
    """
    if result.grad_fn is None:
        return {id(result)} if result.requires_grad else set()
    found: set[int] = set()
    seen: set[Any] = {tensor.grad_fn for tensor in ends}
    stack: list[Any] = [result.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        stack += [follower for follower, _ in node.next_functions]
    return found
