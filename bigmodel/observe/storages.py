"""Following storages operator by operator: what appears, what goes, what is computed.

A storage counts once, however many views look at it; it appears when an operator
returns a tensor on it for the first time and goes when the last tensor, saved tensor or
Python name lets go of it. Parameters, buffers and the batch are known beforehand and do
not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bigmodel.observe.operators import RawOp, describe_operator
from bigmodel.observe.workspaces import Workspaces

_HELD_BY_DISPATCH = 4
"""References to a tensor that is an argument of an operator and nothing else."""
_VIEWS_IN_DISPATCH = 2
"""The same of its storage: by the tensor, and by whoever asks."""

Place = tuple[int, Literal["forward", "backward", "weights"]]
"""Unit and phase in which something happened."""


@dataclass(slots=True)
class RawStorage:
    """A storage that was seen."""

    index: int
    num_bytes: int
    born: Place
    died: Place | None = None
    gradient: bool = False
    boundary: bool = False
    cast: bool = False
    partial: bool = False
    """Whether it is the gradient of one use of a weight that has several."""
    parts: tuple[RawStorage, ...] = ()
    """What was added up to it."""
    workspace: Any = None
    """Key of the operator whose workspace it is."""


@dataclass(frozen=True, slots=True)
class RawGradient:
    """The gradient of a parameter was complete."""

    param: str
    elements: int


@dataclass(frozen=True, slots=True)
class RawFarEnd:
    """A storage goes that another unit has made; see `models.Storage.partner`."""

    storage: RawStorage
    partner: int


RawEvent = tuple[Literal["born", "died"], RawStorage] | RawOp | RawGradient | RawFarEnd


@dataclass(slots=True)
class Recording:
    """All events of one step, in order, by place."""

    events: dict[Place, list[RawEvent]] = field(default_factory=dict)
    storages: list[RawStorage] = field(default_factory=list)
    first_use: dict[int, Place] = field(default_factory=dict)
    """Where each known storage was read first, by its key."""

    def fill(self, workspaces: Workspaces) -> None:
        """Give workspaces the bytes that were measured."""
        for storage in self.storages:
            if storage.workspace is not None:
                storage.num_bytes = workspaces.bytes_of(storage.workspace)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One recorded step and what the hooks learned."""

    recording: Recording
    input_bytes: dict[int, int]
    calls: tuple[int, ...]


class StorageFollower(TorchDispatchMode):
    """Records the life of every storage while it is the innermost dispatch mode."""

    def __init__(
        self, known: Iterable[torch.Tensor], workspaces: Workspaces | None = None
    ) -> None:
        super().__init__()
        self.recording = Recording()
        self._workspaces = workspaces
        self.place: Place = (0, "forward")
        self._known = {storage_key(tensor) for tensor in known}
        self._live: dict[int, tuple[RawStorage, Any]] = {}
        self._next: Place | None = None
        self.enter((0, "forward"))

    def enter(self, place: Place) -> None:
        """Attribute what follows to another unit or phase."""
        self.place = place
        self._next = None
        self.recording.events.setdefault(place, [])

    def enter_with_next_operator(self, place: Place) -> None:
        """Attribute to another place what follows from the next operator on.

        What Python lets go of until then still belongs to where we are: a loop drops
        the input of a block only after the block has returned.
        """
        self._next = place

    def storage_of(self, tensor: torch.Tensor) -> RawStorage | None:
        """Return the record of a tensor's storage; None when it does not count."""
        entry = self._live.get(storage_key(tensor))
        return entry[0] if entry else None

    def gradient_ready(self, name: str, param: torch.Tensor) -> None:
        """Record that the gradient of a parameter is complete."""
        if param.grad is None:
            return
        storage = self.storage_of(param.grad)
        if storage is not None:
            storage.gradient = True
            for part in storage.parts:
                part.partial = part.born[0] != self.place[0]
        self.recording.events[self.place].append(RawGradient(name, param.numel()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._next is not None:
            self.enter(self._next)
        in_place = func is torch.ops.aten.add.Tensor and _is_added_in_place(args)
        result = func(*args, **kwargs)
        outputs = list(_tensors(result))
        inputs = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        operator = describe_operator(func, inputs, result, args, kwargs)
        if operator is not None:
            self.recording.events[self.place].append(operator)
        used = [key for key in map(storage_key, inputs) if key in self._known]
        for key in used:
            self.recording.first_use.setdefault(key, self.place)
        cast = bool(used) and func is torch.ops.aten._to_copy.default
        if in_place and self._keep_storage(args[0], result):
            return result
        before = len(self.recording.storages)
        for output in outputs:
            self._see(output, cast=cast)
        total = self.storage_of(result) if func is torch.ops.aten.add.Tensor else None
        if total is not None:
            total.parts = tuple(part for part in map(self.storage_of, inputs) if part)
        if self._workspaces is not None:
            new = self.recording.storages[before:]
            returned = sum(record.num_bytes for record in new)
            self._add_workspace(
                self._workspaces.key_of(func, args, kwargs, returned, operator)
            )
        return result

    def _add_workspace(self, key: Any) -> None:
        """Note that bytes, which are known later, came and went with an operator."""
        if key is None:
            return
        record = self._record(0)
        record.workspace = key
        self._end(record)

    def _see(self, tensor: torch.Tensor, *, cast: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._known or storage.nbytes() == 0:
            return
        record = self._record(storage.nbytes())
        record.cast = cast
        self._follow(record, tensor)

    def _record(self, num_bytes: int) -> RawStorage:
        record = RawStorage(
            index=len(self.recording.storages), num_bytes=num_bytes, born=self.place
        )
        self.recording.storages.append(record)
        self.recording.events[self.place].append(("born", record))
        return record

    def _follow(self, record: RawStorage, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        reference = weakref.ref(storage, lambda _, key=key: self._bury(key))
        self._live[key] = (record, reference)

    def _keep_storage(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Let a storage go on as another one of its size; return whether it did.

        One that another unit has made ends here, and begins anew: a rank that receives
        it from another keeps what it has received.
        """
        record = self.storage_of(old)
        if record is None or record.num_bytes != new.untyped_storage().nbytes():
            return False
        del self._live[storage_key(old)]
        if record.born[0] != self.place[0]:
            self._end(record)
            before, record = record, self._record(record.num_bytes)
            record.parts = (before,)
        self._follow(record, new)
        return True

    def _bury(self, key: int) -> None:
        record, _ = self._live.pop(key)
        self._end(record)

    def _end(self, record: RawStorage) -> None:
        record.died = self.place
        self.recording.events[self.place].append(("died", record))


def _is_added_in_place(args: tuple[Any, ...]) -> bool:
    """Say whether autograd adds up gradients here, as it does in place.

    Where several gradients meet, its engine adds to the first one if nobody else holds
    it (torch 2.13, `can_accumulate_inplace` in `torch/csrc/autograd/input_buffer.cpp`),
    but never to fake tensors. The numbers are what it and a dispatch hold themselves.
    """
    if torch.is_grad_enabled() or not isinstance(args[0], torch.Tensor):
        return False
    held: int = args[0]._use_count()  # pyright: ignore[reportAttributeAccessIssue]
    views = torch._C._storage_Use_Count(storage_key(args[0]))
    return (held, views) == (_HELD_BY_DISPATCH, _VIEWS_IN_DISPATCH)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    # Operators take and return tensors and flat lists of them; a general walk through
    # trees takes a tenth of the time of a trace.
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tells live storages apart."""
    return tensor.untyped_storage()._cdata
