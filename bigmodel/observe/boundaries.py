"""Noticing when forward and backward pass from one unit of the model to the next.

Units are numbered in forward order: what comes before the blocks, the blocks with what
lies between their containers, what comes after them. A module hook tells when a block's
forward begins and ends; a tensor hook on what a unit returns tells when the gradient
reaches it, that is, when its backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from bigmodel.observe.layout import Layout
from bigmodel.observe.repetition import Row
from bigmodel.observe.storages import StorageFollower


class NotSkippableError(Exception):
    """Equal blocks cannot stand for each other here; every block must be traced."""


class UnitBoundaries:
    """Hooks on the blocks of a fake model that tell a follower where it is."""

    def __init__(
        self, blocks: Sequence[nn.Module], layout: Layout, follower: StorageFollower
    ) -> None:
        self._layout = layout
        self._follower = follower
        self._outputs: list[torch.Tensor] = []
        self._carried: dict[int, int] = {}
        self._num_outputs = 0
        self._closed_to_gradients = False
        self._form: Any = None
        self._handles: list[Any] = []
        self._skipped: list[nn.Module] = []
        self.calls: list[int] = []
        self.input_bytes: dict[int, int] = {}
        for index, block in enumerate(blocks):
            row = layout.rows[layout.row_index(index)]
            if row.is_real(index):
                self._watch(index, block, row)
            else:
                self._skip(index, block)

    def ignore_gradients(self) -> None:
        """Stay where the follower is when gradients pass from unit to unit again."""
        self._closed_to_gradients = True

    def close(self) -> None:
        """Let go of everything that would keep tensors alive."""
        self._outputs = []
        for handle in self._handles:
            handle.remove()
        for block in self._skipped:
            # Blocks that turn out not to be skippable are traced next, themselves.
            vars(block).pop("forward", None)

    def _watch(self, index: int, block: nn.Module, row: Row) -> None:
        unit = self._layout.unit_of_block(index)
        last = index == row.first + row.length - 1

        def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self.calls.append(index)
            leaves = _tensors((args, kwargs))
            self._map_carried((args, kwargs))
            source = self._follower.place[0]
            self.input_bytes[unit] = self._mark_boundary(leaves, source)
            self._follower.enter((unit, "forward"))

        def after(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self._mark_boundary(_tensors(output), unit)
            self._outputs = [] if last else _tensors(output)
            self._form = _form_of(output)
            if last:
                self._follower.enter_with_next_operator((unit + 1, "forward"))

        self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(block.register_forward_hook(after, with_kwargs=True))

    def _mark_boundary(self, leaves: list[torch.Tensor], unit: int) -> int:
        """Mark what a unit hands over; returns its bytes and hooks its gradient."""
        handed = 0
        for tensor in leaves:
            record = self._follower.storage_of(tensor)
            if record is None or not tensor.requires_grad:
                continue
            if record.born == (unit, "forward") and not record.boundary:
                record.boundary = True
                tensor.register_hook(self._gradient_hook(unit))
            if record.boundary and record.born[0] == unit:
                handed += record.num_bytes
        return handed

    def _gradient_hook(self, unit: int):
        def reached(gradient: torch.Tensor) -> None:
            if self._closed_to_gradients:
                return
            record = self._follower.storage_of(gradient)
            if record is not None and not record.gradient:
                record.boundary = True
            self._follower.enter((unit, "backward"))

        return reached

    def _map_carried(self, call: Any) -> None:
        """Learn which input of a block is which output of the block before."""
        if not self._outputs:
            return
        flat, _ = tree_flatten(call)
        self._carried = {
            position: source
            for position, leaf in enumerate(flat)
            for source, output in enumerate(self._outputs)
            if leaf is output
        }
        self._num_outputs = len(self._outputs)
        self._outputs = []

    def _skip(self, index: int, block: nn.Module) -> None:
        """Make a block hand its input on, in the form in which a real one returns."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(index)
            self._map_carried((args, kwargs))
            flat, _ = tree_flatten((args, kwargs))
            by_output = {source: flat[at] for at, source in self._carried.items()}
            if len(by_output) != self._num_outputs:
                raise NotSkippableError
            leaves, structure = tree_flatten(self._form)
            tensors = (by_output[output] for output in range(self._num_outputs))
            handed_on = [next(tensors) if leaf is _TENSOR else leaf for leaf in leaves]
            return tree_unflatten(handed_on, structure)

        block.forward = forward
        self._skipped.append(block)


_TENSOR = object()
"""Stands for a tensor in the remembered form of an output, which keeps none alive."""


def _form_of(output: Any) -> Any:
    leaves, structure = tree_flatten(output)
    marked = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(marked, structure)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
