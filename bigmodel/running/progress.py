"""What a training run shows: one bar on rank 0, and a file of one line a step."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import final

import torch
from tqdm import tqdm

from bigmodel.running.session import Engine, StepResult
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
    """

    def __init__(
        self,
        engine: Engine,
        total: int,
        *,
        tokens_per_sample: int | None = None,
        file: str | Path | None = None,
    ) -> None:
        self._engine = engine
        self._per_sample = tokens_per_sample or 1
        self._unit = "samples" if tokens_per_sample is None else "tokens"
        self._file = Path(file) if file is not None and engine.is_first else None
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
        if self._file is None and now - self._shown < 1:
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
        if self._file is not None:
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
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """End the bar."""
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
