"""One process, alone or with several devices; on a CPU every device is the same one."""

from __future__ import annotations

import warnings
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.overhead.loops.loop import Batch, Loop, accumulating_loop
from benchmarks.overhead.subjects import (
    CLIP_NORM,
    UNITS,
    loss_of,
    make_model,
    make_optimizer,
)
from bigmodel.plans import Plan


def plain(plan: Plan) -> Loop:
    """Return the loop without any library."""
    model = make_model()
    return accumulating_loop(model, model)


def naive(plan: Plan) -> Loop:
    """Return the loop with layers dealt to the devices."""
    model = make_model()
    devices = _devices(plan)
    bounds = (0, *plan.stages.cuts, len(UNITS))
    parts = [
        model[low:high].to(device)
        for (low, high), device in zip(pairwise(bounds), devices, strict=True)
    ]

    def forward(features: Tensor) -> Tensor:
        hidden = features
        for part, device in zip(parts, devices, strict=True):
            hidden = part(hidden.to(device))
        return hidden.to(devices[0])

    return accumulating_loop(model, forward)


def dataparallel(plan: Plan) -> Loop:
    model = make_model()
    return accumulating_loop(model, nn.DataParallel(model))


def fairscale_pipe(plan: Plan) -> Loop:
    with warnings.catch_warnings():
        # It says that it has moved into torch, which has dropped it since.
        warnings.simplefilter("ignore")
        from fairscale.nn import Pipe

        bounds = (0, *plan.stages.cuts, len(UNITS))
        pipe = Pipe(
            make_model(),
            balance=[high - low for low, high in pairwise(bounds)],
            devices=_devices(plan),
            chunks=plan.accumulation,
            checkpoint="never",
        )
    optimizer = make_optimizer(pipe.parameters())

    def step(batch: Batch) -> Tensor:
        # Micro-batches are of one size, so the mean over all is that of their means.
        loss = loss_of(pipe(batch[0]), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(pipe.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Loop(step)


def _devices(plan: Plan) -> list[torch.device]:
    return [torch.device("cpu")] * plan.devices_per_process
