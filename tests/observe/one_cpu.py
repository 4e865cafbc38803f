"""Predicted and measured peaks of one process on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import bigmodel
from benchmarks.memory_accuracy.__main__ import CLUSTER
from bigmodel.plans import Plan
from bigmodel.running.measuring import measure_memory
from bigmodel.running.session import prepare
from bigmodel.search import predict
from bigmodel.simulator import Costs

ONE_CPU = replace(CLUSTER, node=replace(CLUSTER.node, count=1))


def peaks(
    make: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    loss: Callable[[torch.Tensor, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    plan: Plan,
) -> tuple[int, int]:
    """Return the predicted and the measured peak of allocated bytes of a step.

    Args:
        make: Makes the model.
        batch: Makes a batch of a number of samples.
        loss: Of the model's output and the batch.
        optimizer: Makes it, of parameters.
        plan: All but its units.
    """
    spec = bigmodel.trace(
        make, batch(2), precision=plan.precision, target="cpu", loss=loss
    )
    plan = replace(plan, units=spec.units)
    measured = measure_memory(
        lambda: prepare(plan, make, optimizer, loss), lambda _: batch(plan.local_batch)
    )
    (rank,) = predict(plan, Costs(spec, ONE_CPU)).ranks
    return rank.allocated, measured.peak
