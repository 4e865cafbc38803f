"""Measuring allocated bytes on the CPU exactly, from the allocator's own events.

torch's profiler reports every allocation and free of the CPU allocator, buffers made in
C++ by DDP and autograd included, with the allocator's total after it. That total is
what `torch.cuda.memory_allocated` would be on a GPU.

[Note: Frees on gloo's threads]
The profiler sees the thread that records. A thread of gloo holds the tensors of a
collective a moment longer than the one that waits for it, and when it is the last to
let go, that free is not an event of its own. The allocator's total knows of it when it
keeps count for every thread, which is a flag of torch's C++ library that no Python call
sets; so it is set by its symbol. While recording, every wait is followed by a short
sleep, in which gloo's thread lets go first: on a GPU nothing is held so long.
"""

from __future__ import annotations

import ctypes
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "bigmodel.phase:"
_SETTLING_SECONDS = 0.002
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"
_COUNT_EVERY_THREAD = "FLAGS_caffe2_report_cpu_memory_usage"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Allocated bytes in one phase of a run."""

    name: str
    start: int
    """Live bytes when it began, of those allocated since recording began."""
    peak: int
    end: int
    seconds: float


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a phase of a recorded run."""
    with record_function(_MARK + name):
        yield
    # An event after its end says what is live then, also where another thread freed.
    torch.empty(1, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class _Change:
    """An allocation or a free of the recording thread."""

    moment: int
    before: int
    """Live bytes just before it, those of other threads included."""
    after: int


def record_phases(run: Callable[[], None]) -> tuple[PhaseMemory, ...]:
    """Run a function and return the allocated bytes of every phase it marks.

    Everything that is to be counted must be allocated inside the function. Times are
    those of a profiled run and longer than without.
    """
    with (
        _quiet_profiler(),
        _settled_collectives(),
        _every_thread_counted(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    # No public part of torch; its annotations lack what is read here.
    results: Any = getattr(profiler.profiler, "kineto_results", None)
    changes: list[_Change] = []
    marks: list[tuple[int, int, str]] = []
    others: int | None = None
    for event in _walk(results.experimental_event_tree()):
        if event.name == "[memory]":
            found = event.extra_fields
            before = found.total_allocated - found.alloc_size
            if others is None:
                others = before
            changes.append(
                _Change(
                    event.start_time_ns, before - others, found.total_allocated - others
                )
            )
        elif event.name.startswith(_MARK):
            name = event.name.removeprefix(_MARK)
            marks.append((event.start_time_ns, event.end_time_ns, name))
    return tuple(
        _phase(name, start, end, changes) for start, end, name in sorted(marks)
    )


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    """Yield events in the order in which they began."""
    waiting = list(events)
    found = []
    while waiting:
        event = waiting.pop()
        found.append(event)
        waiting.extend(event.children)
    yield from sorted(found, key=lambda event: event.start_time_ns)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep Kineto from writing lines; it looks only here when it first begins."""
    environment = os.environ  # noqa: TID251
    before = environment.get(_LOG_LEVEL)
    environment[_LOG_LEVEL] = before or _SILENT
    try:
        yield
    finally:
        if before is None:
            del environment[_LOG_LEVEL]


@contextmanager
def _every_thread_counted() -> Iterator[None]:
    """Let the allocator keep its total for all threads, where torch has the flag."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        flag = ctypes.c_bool.in_dll(library, _COUNT_EVERY_THREAD)
    except ValueError:
        yield
        return
    before, flag.value = flag.value, True
    try:
        yield
    finally:
        flag.value = before


@contextmanager
def _settled_collectives() -> Iterator[None]:
    """Give gloo's threads time to let go; see [Note: Frees on gloo's threads]."""
    wait, get_future = Work.wait, Work.get_future

    def wait_and_settle(work: Work, *args: Any) -> Any:
        result = wait(work, *args)
        time.sleep(_SETTLING_SECONDS)
        return result

    def future_when_done(work: Work) -> Any:
        # What a hook of DDP chains to it then runs on this thread, not on gloo's.
        future = get_future(work)
        future.wait()
        time.sleep(_SETTLING_SECONDS)
        return future

    Work.wait = wait_and_settle  # pyright: ignore[reportAttributeAccessIssue]
    Work.get_future = future_when_done  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
        Work.get_future = get_future  # pyright: ignore[reportAttributeAccessIssue]


def _phase(name: str, start: int, end: int, changes: Sequence[_Change]) -> PhaseMemory:
    first, last = (
        bisect_left(changes, moment, key=lambda change: change.moment)
        for moment in (start, end)
    )
    at_start, at_end = changes[first].before, changes[last].before
    return PhaseMemory(
        name=name,
        start=at_start,
        peak=max(at_start, at_end, *(c.after for c in changes[first:last])),
        end=at_end,
        seconds=(end - start) / 1e9,
    )
