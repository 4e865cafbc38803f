"""What CPU operators allocate inside and free before they return.

Fake tensors show what an operator returns, not what it takes meanwhile in C++: copies
of a convolution's operands in oneDNN's layout, or of a type that it computes in. On a
CPU each operator is therefore run once for each kind of arguments, on zeros, and the
allocator's events are read. One thread is used; every other one adds its own scratch
pad, a few per cent of the workspace. On GPUs nothing is measured: cuDNN's workspaces
are not those of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from bigmodel.observe.allocations import phase, record_phases
from bigmodel.observe.operators import RawOp

_LARGEST_BYTES = 64 << 20
"""Operators with more bytes of tensors are not run: planning is to stay cheap."""
_MOST_FLOPS = 2_000_000_000

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@final
class Workspaces:
    """Workspaces of the operators of a trace, measured together at its end."""

    def __init__(self) -> None:
        self._calls: dict[Any, Call] = {}
        self._returned: dict[Any, int] = {}
        self._bytes: dict[Any, int] = {}

    def key_of(
        self, func: Any, args: tuple, kwargs: dict, returned: int, cost: RawOp | None
    ) -> Any:
        """Note an operator; return how to ask for its bytes, None where it has none.

        Args:
            func: The operator.
            args: Fake.
            kwargs: Fake.
            returned: Bytes of new storages that it returned.
            cost: None where it runs no kernel.
        """
        if cost is None or func._schema.is_mutable or func.namespace != "aten":
            # Not what runs no kernel, writes to its arguments, or is a user's own.
            return None
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
            # Zeros may not be what an index can be.
            return None
        key = (func, structure, tuple(map(_described, leaves)))
        if key not in self._calls:
            small = cost.flops <= _MOST_FLOPS and cost.bytes_moved <= _LARGEST_BYTES
            plain = [_like(leaf) if small else None for leaf in leaves]
            described = pytree.tree_unflatten(plain, structure)
            self._calls[key] = (func if small else _nothing, *described)
            self._returned[key] = returned
        return key

    def measure(self) -> None:
        """Run what has been noted since the last time."""
        new = [key for key in self._calls if key not in self._bytes]
        if not new:
            return

        def run() -> None:
            for index, key in enumerate(new):
                func, args, kwargs = self._calls[key]
                real_args, real_kwargs = pytree.tree_map_only(
                    _Zeros, _Zeros.make, (args, kwargs)
                )
                # Fake tensors pass types that a kernel may not take.
                with phase(str(index)), suppress(RuntimeError):
                    func(*real_args, **real_kwargs)

        with _one_thread(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            phases = {int(found.name): found for found in record_phases(run)}
        for index, key in enumerate(new):
            inside = phases[index].peak - phases[index].start
            self._bytes[key] = max(0, inside - self._returned[key])

    def bytes_of(self, key: Any) -> int:
        """Return the bytes of a noted operator, beyond what it returned."""
        return self._bytes[key]


@final
class _Zeros:
    """A tensor that is made when it is needed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._size = tuple(tensor.shape)
        self._stride = tuple(tensor.stride())
        self._dtype = tensor.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype).zero_()


def _like(leaf: Any) -> Any:
    return _Zeros(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype
    return str(leaf)


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for an operator that is too large to be run."""


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
