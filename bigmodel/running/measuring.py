"""Measuring what a plan really takes: allocated bytes and seconds of single steps.

On a GPU torch keeps the peak itself. On the CPU the allocator's events are recorded,
which slows the steps down: take seconds from a run of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bigmodel.observe.allocations import phase, record_phases
from bigmodel.running.session import Engine

_ATTEMPTS = 3
"""Recordings of a CPU run until one does not drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Allocated bytes of this rank in a steady optimizer step."""

    peak: int
    """`torch.cuda.max_memory_allocated`; on the CPU the same from allocator events."""
    between: int
    """Live before the step."""
    first_peak: int
    """Peak of the first step, in which optimizer states are made."""
    initial_peak: int
    """Peak while the engine is made."""
    drift: int
    """Bytes by which the recording of the CPU allocator ran away in a step; 0 when it
    can be trusted."""


def measure_memory(
    make: Callable[[], Engine], batch: Callable[[Engine], Any], *, steps: int = 3
) -> StepMemory:
    """Make an engine, run a few steps and return the allocated bytes of the last one.

    All ranks call it together.

    Args:
        make: Makes the model and prepares the engine; called anew for every recording.
        batch: Makes this rank's local batch.
        steps: Optimizer steps; the last one counts, so at least 3.
    """
    if torch.cuda.is_available():
        return _measure_cuda(make, batch, steps)
    made = min(_record_made(make) for _ in range(2))
    memory = _record_cpu(make, batch, steps, made)
    for _ in range(_ATTEMPTS - 1):
        if not memory.drift:
            break
        memory = _record_cpu(make, batch, steps, made)
    return memory


def measure_seconds(
    engine: Engine, batch: Any, *, steps: int = 8, warm_up: int = 2
) -> list[float]:
    """Return the seconds of single optimizer steps, after some that do not count."""
    seconds: list[float] = []
    for index in range(warm_up + steps):
        start = time.perf_counter()
        # Reading the loss waits for the device.
        float(engine.step(batch).loss)
        if index >= warm_up:
            seconds.append(time.perf_counter() - start)
    return seconds


def _record_made(make: Callable[[], Engine]) -> int:
    """Return the bytes that are live once the engine is made."""
    kept: list[Engine] = []

    def run() -> None:
        with phase("make"):
            kept.append(make())

    (made,) = record_phases(run)
    kept.pop().close()
    return made.end


def _record_cpu(
    make: Callable[[], Engine],
    batch: Callable[[Engine], Any],
    steps: int,
    least_made: int,
) -> StepMemory:
    kept: list[Engine] = []

    def run() -> None:
        with phase("make"):
            kept.append(make())
        local = batch(kept[0])
        for index in range(steps):
            with phase(f"step {index}"):
                kept[0].step(local)

    phases = record_phases(run)
    made, first, last = phases[0], phases[1], phases[-1]
    # Frees that were missed only ever add: the smaller of several recordings is right.
    drift = _largest(max(made.end - least_made, abs(last.end - last.start)))
    kept.pop().close()
    return StepMemory(
        peak=last.peak,
        between=last.start,
        first_peak=first.peak,
        initial_peak=made.peak,
        # Scalars that a step returns come and go; a lost tensor is larger.
        drift=drift if drift > 4096 else 0,
    )


def _largest(count: int) -> int:
    """Return the largest of the counts of all ranks, so that they decide alike."""
    counts = torch.tensor(count)
    if dist.is_initialized():
        dist.all_reduce(counts, dist.ReduceOp.MAX)
    return int(counts)


def _measure_cuda(
    make: Callable[[], Engine], batch: Callable[[Engine], Any], steps: int
) -> StepMemory:
    torch.cuda.reset_peak_memory_stats()
    engine = make()
    initial = torch.cuda.max_memory_allocated()
    local = batch(engine)
    peaks: list[int] = []
    between = 0
    for _ in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        between = torch.cuda.memory_allocated()
        engine.step(local)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    engine.close()
    return StepMemory(
        peak=peaks[-1],
        between=between,
        first_peak=peaks[0],
        initial_peak=initial,
        drift=0,
    )
