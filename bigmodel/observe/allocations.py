"""Measuring allocated bytes on the CPU exactly, from the allocator's own events.

torch's profiler reports every allocation and free of the CPU allocator with its signed
size, buffers made in C++ by DDP and autograd included. Their running sum is what
`torch.cuda.memory_allocated` would be on a GPU.

[Note: Frees on gloo's threads]
The profiler sees the thread that records. A thread of gloo holds the tensors of a
collective a moment longer than the one that waits for it, and when it is the last to
let go, the free is not reported and the sum drifts upwards. While recording, every wait
is followed by a short sleep, in which gloo's thread lets go first. Compare the ends of
two steps to see whether that was long enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "bigmodel.phase:"
_SETTLING_SECONDS = 0.002


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


def record_phases(run: Callable[[], None]) -> tuple[PhaseMemory, ...]:
    """Run a function and return the allocated bytes of every phase it marks.

    Everything that is to be counted must be allocated inside the function. Times are
    those of a profiled run and longer than without.
    """
    with (
        _settled_collectives(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    # No public part of torch; its annotations lack what is read here.
    results: Any = getattr(profiler.profiler, "kineto_results", None)
    changes: list[tuple[int, int]] = []
    marks: list[tuple[int, int, str]] = []
    for event in results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(_MARK):
            start = event.start_ns()
            end = start + event.duration_ns()
            marks.append((start, end, event.name().removeprefix(_MARK)))
    changes.sort(key=lambda change: change[0])
    return tuple(
        _phase(name, start, end, changes) for start, end, name in sorted(marks)
    )


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


def _phase(
    name: str, start: int, end: int, changes: list[tuple[int, int]]
) -> PhaseMemory:
    live = at_start = 0
    peak: int | None = None
    for moment, count in changes:
        if moment >= end:
            break
        if moment >= start and peak is None:
            at_start = peak = live
        live += count
        if peak is not None:
            peak = max(peak, live)
    return PhaseMemory(
        name=name,
        start=at_start if peak is not None else live,
        peak=peak if peak is not None else live,
        end=live,
        seconds=(end - start) / 1e9,
    )
