"""Measuring what a plan really takes: allocated bytes and seconds of single steps.

On a GPU torch keeps the peak itself. On the CPU the allocator's events are recorded,
which slows the steps down: take seconds from a run of their own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bigmodel.observe.allocations import phase, record_phases
from bigmodel.running.session import Engine

_TIMING = 0.001
"""Share of the peak by which steady steps differ when timing decides."""
_MORE = 4
"""How many times as many steps are taken then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Allocated bytes of this rank in steady optimizer steps."""

    peak: int
    """`torch.cuda.max_memory_allocated`; on the CPU the same from allocator events."""
    between: int
    """Live before such a step."""
    first_peak: int
    """Peak of the first step, in which optimizer states are made."""
    initial_peak: int
    """Peak while the engine is made."""


def measure_memory(
    make: Callable[[], Engine], batch: Callable[[Engine], Any], *, steps: int = 6
) -> StepMemory:
    """Make an engine, run a few steps and return the bytes of the steady ones.

    All ranks call it together. Steps are not alike at first: DDP forms its buckets anew
    in the second, DeepSpeed's stage 3 knows the order of recomputed modules in the
    fourth. The second half counts, by its largest step. Where these differ it is a
    matter of time when a gradient that was sent is let go (fairscale looks which are
    sent by now), and more steps are taken.

    Args:
        make: Makes the model and prepares the engine.
        batch: Makes this rank's local batch.
        steps: Optimizer steps.
    """
    if torch.cuda.is_available():
        return _measure_cuda(make, batch, steps)
    memory, spread = _record_cpu(make, batch, steps)
    if _largest(spread) > _TIMING:
        memory, _ = _record_cpu(make, batch, _MORE * steps)
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


def _record_cpu(
    make: Callable[[], Engine], batch: Callable[[Engine], Any], steps: int
) -> tuple[StepMemory, float]:
    """Return the bytes, and the share by which the steady steps' peaks differ."""
    kept: list[Engine] = []
    # Cycles that an engine before has left would go during the steps.
    gc.collect()

    def run() -> None:
        with phase("make"):
            kept.append(make())
        local = batch(kept[0])
        for index in range(steps):
            with phase(f"step {index}"):
                kept[0].step(local)

    made, *recorded = record_phases(run)
    kept.pop().close()
    peaks = [step.peak for step in recorded[_steady(steps)]]
    memory = StepMemory(
        peak=max(peaks),
        between=recorded[-1].start,
        first_peak=recorded[0].peak,
        initial_peak=made.peak,
    )
    return memory, 1 - min(peaks) / max(peaks)


def _largest(share: float) -> float:
    """Return the largest of the shares of all ranks, so that they decide alike."""
    shares = torch.tensor(share)
    if dist.is_initialized():
        dist.all_reduce(shares, dist.ReduceOp.MAX)
    return float(shares)


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
        peak=max(peaks[_steady(steps)]),
        between=between,
        first_peak=peaks[0],
        initial_peak=initial,
    )


def _steady(steps: int) -> slice:
    return slice(steps // 2, None)
