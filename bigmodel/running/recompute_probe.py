"""Whether recomputed blocks do the same twice: found out once, at the first step.

A block that does not (it counts its calls, draws numbers of its own, routes by a cache)
gets wrong gradients, which torch notices only where sizes differ, and then without a
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigmodel.backends.recompute import statistics_kept, watching
from bigmodel.errors import UsageError, Violation
from bigmodel.plans import Plan

_RELATIVE = 1e-3
"""Largest difference that rounding in another order explains, by the largest value."""


@dataclass(frozen=True, slots=True)
class _Output:
    """What one module returned."""

    name: str
    values: tuple[Tensor, ...]


@contextmanager
def probed(plan: Plan) -> Iterator[None]:
    """Run every recomputed block twice more, at its first call, and compare.

    Raises:
        UsageError: A block differs; names the first module in it that does.
    """
    if "full" not in plan.recompute or plan.compile:
        yield
        return
    seen: set[str] = set()

    def check(
        block: nn.Module,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if name in seen:
            return
        seen.add(name)
        difference = first_difference(block, forward, args, kwargs)
        if difference is not None:
            path, what = difference
            raise UsageError(
                Violation(
                    field="recompute",
                    got="full",
                    rule=f"{'.'.join(filter(None, (name, path)))} "
                    f"({type(block.get_submodule(path)).__name__}) does not return the "
                    f"same when it runs again: {what}; gradients would be wrong",
                    cure=f"set the policy of unit {name!r} to 'none', or let the "
                    "module depend on its inputs alone",
                )
            )

    with watching(check):
        yield


@torch.no_grad()
def first_difference(
    block: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[str, str] | None:
    """Run a block's forward twice on the same inputs and random numbers.

    Returns:
        Path within the block of the first module whose outputs differ, and how they do;
        None where all is the same.
    """
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    with statistics_kept(block):
        first = _outputs(block, forward, args, kwargs)
        second = _outputs(block, forward, args, kwargs)
    for buffer, before in buffers:
        if not torch.equal(buffer, before):
            buffer.copy_(before)
    for one, other in zip(first, second, strict=False):
        if one.name != other.name:
            return other.name, f"it ran in place of {one.name or 'the block'}"
        what = _difference(one.values, other.values)
        if what:
            return one.name, what
    if len(first) != len(second):
        return "", f"{len(first)} modules ran at first, and then {len(second)}"
    return None


def _outputs(
    block: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[_Output]:
    """Return the outputs of all modules in the order in which they ended."""
    found: list[_Output] = []

    def note(name: str, output: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        # Copies: what works in place changes what another module has returned.
        found.append(_Output(name, tuple(leaf.detach().clone() for leaf in leaves)))

    def hook(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: note(name, output)

    hooks = [
        module.register_forward_hook(hook(name))
        for name, module in block.named_modules()
        if name
    ]
    try:
        with torch.random.fork_rng(device_type=_device(block)):
            # The block's own hooks are not for us: they belong to the call around.
            note("", forward(*args, **kwargs))
    finally:
        for handle in hooks:
            handle.remove()
    return found


def _device(block: nn.Module) -> str:
    first = next(block.parameters(), None)
    return "cuda" if first is None or first.device.type == "cpu" else first.device.type


def _difference(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> str:
    if len(one) != len(other):
        return f"{len(one)} tensors at first, and then {len(other)}"
    for a, b in zip(one, other, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return (
                f"shape {tuple(a.shape)} of {a.dtype} at first, and then "
                f"{tuple(b.shape)} of {b.dtype}"
            )
        if not a.numel():
            continue
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return "other values"
            continue
        apart = (a.float() - b.float()).abs().nan_to_num(0.0).max()
        if apart > _RELATIVE * a.float().abs().nan_to_num(0.0).max():
            return f"values differ by up to {float(apart):.3g}"
    return ""
