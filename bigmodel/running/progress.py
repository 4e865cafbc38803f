"""What a training run shows: a bar, a file of one line a step, trackers; on rank 0."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from tqdm import tqdm

from bigmodel.running.engine import Engine, StepResult
from bigmodel.running.trackers import Trackers
from bigmodel.units import format_bytes


@final
class Progress:
    """Shows loss, speed and peak memory of a run; a context manager.

    Reading the loss waits for the device, so the bar is renewed at most once a second
    unless every step is written to a file.

    Args:
        engine: The engine whose steps are shown.
        total: Steps of the run, those of a loaded checkpoint included.
        tokens_per_sample: For tokens per second and device; None: samples per second.
        file: Where to write one JSON object per step.
        trackers: Names such as `tensorboard`, or trackers of accelerate; they get loss,
            gradient norm and speed of every step.
        logging_dir: Folder of those that write files.
        run: What they call the run.
    """

    def __init__(
        self,
        engine: Engine,
        total: int,
        *,
        tokens_per_sample: int | None = None,
        file: str | Path | None = None,
        trackers: Sequence[Any] = (),
        logging_dir: str | Path | None = None,
        run: str = "bigmodel",
    ) -> None:
        self._engine = engine
        self._per_sample = tokens_per_sample or 1
        self._unit = "samples" if tokens_per_sample is None else "tokens"
        self._file = Path(file) if file is not None and engine.is_first else None
        self._trackers = Trackers(trackers if engine.is_first else (), run, logging_dir)
        self._every_step = self._file is not None or bool(trackers)
        self._bar: tqdm | None = None
        if engine.is_first:
            self._bar = tqdm(
                total=total,
                initial=engine.steps,
                unit="step",
                # In a file or a pipe a bar would be one long line.
                disable=not sys.stderr.isatty(),
            )
        self._begin = self._shown = time.perf_counter()
        self._samples = 0

    def show(self, result: StepResult) -> None:
        """Count a step, and show it when a second has passed."""
        if self._bar is None:
            return
        self._samples += result.samples
        now = time.perf_counter()
        self._bar.update()
        if not self._every_step and now - self._shown < 1:
            return
        self._shown = now
        loss = float(result.loss)
        elapsed = time.perf_counter() - self._begin
        world = self._engine.plan.world
        rate = self._samples * self._per_sample / elapsed / world
        peak = peak_bytes(self._engine.device)
        self._bar.set_postfix_str(
            f"loss {loss:.4f}, {rate:,.0f} {self._unit}/s/device, "
            f"peak {format_bytes(peak)}"
        )
        if self._every_step:
            line = {
                "step": self._engine.steps,
                "loss": loss,
                "grad_norm": None
                if result.grad_norm is None
                else float(result.grad_norm),
                "seconds": elapsed,
                f"{self._unit}_per_second_per_device": rate,
                "peak_bytes": peak,
            }
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            numbers = {key: value for key, value in line.items() if value is not None}
            self._trackers.log(numbers, numbers.pop("step"))

    def close(self) -> None:
        """End the bar and the trackers."""
        self._trackers.close()
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
