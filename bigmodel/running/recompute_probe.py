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
    if not plan.recomputed or plan.compile:
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
                    got=dict(zip(plan.units, plan.recompute, strict=True))[name],
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
    kept = [(buffer, buffer.clone()) for buffer in block.buffers()]
    first: list[_Output] = []
    found: list[tuple[str, str]] = []
    ran = 0

    def keep(name: str, values: list[Tensor]) -> None:
        # Copies, because what works in place changes what another module returned; in
        # the CPU's memory, because the plan has no place for them on the device.
        copies = tuple(value.detach().to("cpu", copy=True) for value in values)
        first.append(_Output(name, copies))

    def compare(name: str, values: list[Tensor]) -> None:
        nonlocal ran
        ran += 1
        if found or ran > len(first):
            return
        before = first[ran - 1]
        if before.name != name:
            found.append((name, f"it ran in place of {before.name or 'the block'}"))
            return
        what = _difference(before.values, tuple(values))
        if what:
            found.append((name, what))

    with statistics_kept(block), _no_cached_casts():
        _run(block, forward, args, kwargs, keep)
        _run(block, forward, args, kwargs, compare)
    for buffer, before in kept:
        if not torch.equal(buffer, before):
            buffer.copy_(before)
    if not found and ran != len(first):
        return "", f"{len(first)} modules ran at first, and then {ran}"
    return found[0] if found else None


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Leave autocast's cache of weights as it is: the real forward is to make its own.

    A forward that finds casts there runs fewer operators than the one in the backward,
    which policy `selective` does not allow.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _run(
    block: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    note: Callable[[str, list[Tensor]], None],
) -> None:
    """Note the outputs of all modules in the order in which they end."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: note(name, _tensors(output))

    hooks = [
        module.register_forward_hook(hook(name))
        for name, module in block.named_modules()
        if name
    ]
    try:
        with torch.random.fork_rng(device_type=_device(block)):
            # The block's own hooks are not for us: they belong to the call around.
            note("", _tensors(forward(*args, **kwargs)))
    finally:
        for handle in hooks:
            handle.remove()


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


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
            if not torch.equal(a, b.to(a.device)):
                return "other values"
            continue
        b = b.to(a.device)
        apart = (a.float() - b.float()).abs().nan_to_num(0.0).max()
        if apart > _RELATIVE * a.float().abs().nan_to_num(0.0).max():
            return f"values differ by up to {float(apart):.3g}"
    return ""
