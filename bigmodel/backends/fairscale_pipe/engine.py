"""Training with fairscale's Pipe."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from bigmodel.backends.engine import AbstractEngine, Batch, Job, LossShare
from bigmodel.backends.forward import compute_loss, model_inputs, weigh
from bigmodel.backends.one_process import AbstractOneProcessEngine
from bigmodel.backends.own_devices import own_devices
from bigmodel.backends.precision import cast_inputs
from bigmodel.backends.recompute import apply_recompute
from bigmodel.errors import MissingDependencyError, UsageError
from bigmodel.observe.blocks import get_blocks


def build(job: Job) -> AbstractEngine:
    """Return the engine of this process."""
    return FairscalePipeEngine(job)


@final
class FairscalePipeEngine(AbstractOneProcessEngine):
    """All micro-batches go through the pipeline in one call, and back in another."""

    def __init__(self, job: Job) -> None:
        model, plan = job.model, job.plan
        if not isinstance(model, nn.Sequential):
            raise UsageError(
                f"fairscale's Pipe takes an nn.Sequential, not a "
                f"{type(model).__name__}; use backend 'pipeline' or 'naive'"
            )
        apply_recompute(get_blocks(model, plan.units), plan)
        devices = own_devices(job.device, plan.devices_per_process)
        cuts = plan.stages.cuts if plan.stages else ()
        counts = [high - low for low, high in pairwise((0, *cuts, len(model)))]
        self._pipe = _make_pipe(model, counts, devices, plan.accumulation)
        super().__init__(job, model, several_backwards=False)

    def call(self, *positional: Any, **named: Any) -> Any:
        """Call the pipeline; its output is given back on the first device."""
        positional, named = cast_inputs(self._plan, (positional, named))
        if len(positional) != 1 or named or not isinstance(positional[0], Tensor):
            raise UsageError(
                "an nn.Sequential under fairscale's Pipe is called with one tensor; "
                "give batches (inputs, target) and a loss function"
            )
        return self._pipe(positional[0].to(self._device)).to(self._device)

    def forward_backward(
        self, micro_batches: Sequence[Batch], shares: Sequence[LossShare]
    ) -> Tensor:
        """Run all forwards, then all backwards."""
        inputs = []
        for batch in micro_batches:
            positional, named = model_inputs(self._model, batch, self._loss)
            if named or len(positional) != 1:
                # Says what is wrong.
                self.call(*positional, **named)
            inputs.append(positional[0])
        whole = self.call(torch.cat(inputs))
        outputs = whole.split([len(values) for values in inputs])
        losses = [
            weigh(compute_loss(self._model, output, batch, self._loss), share)
            for output, batch, share in zip(outputs, micro_batches, shares, strict=True)
        ]
        total = torch.stack(losses).sum()
        self.backward(total)
        return total.detach()


def _make_pipe(
    model: nn.Sequential, counts: list[int], devices: list[torch.device], chunks: int
) -> Any:
    with warnings.catch_warnings():
        # It says that it has moved into torch, which has dropped it since.
        warnings.simplefilter("ignore")
        try:
            from fairscale.nn import Pipe
        except ImportError:
            raise MissingDependencyError(
                "fairscale", "fairscale", "backend 'fairscale_pipe'"
            ) from None
        # Recomputing is up to the plan, unit by unit.
        pipe = Pipe(model, counts, devices=devices, chunks=chunks, checkpoint="never")
    queues = pipe.pipeline.in_queues, pipe.pipeline.out_queues
    # At the interpreter's end Pipe would join threads that no longer run, for ever.
    weakref.finalize(pipe, _end_threads, *queues)
    return pipe


def _end_threads(in_queues: list[Any], out_queues: list[Any]) -> None:
    from fairscale.nn.pipe.worker import join_workers

    join_workers(in_queues, out_queues)
    # The lists are Pipe's own: it finds nobody left to wait for.
    in_queues.clear()
    out_queues.clear()
