"""Inputs of recomputed units in the CPU's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.memory_accuracy import cases as matrix
from bigmodel import Offload, Plan, cluster, trace
from bigmodel.backends import recompute
from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.search import predict
from bigmodel.simulator import Costs

OFFLOAD = Offload(activations="cpu")


def test_only_inputs_of_recomputed_units_are_moved(monkeypatch) -> None:
    # On a CPU `save_on_cpu` moves nothing, so hooks that copy stand for it.
    moved: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tuple(tensor.shape))
        return tensor.detach().clone()

    hooks = torch.autograd.graph.saved_tensors_hooks
    monkeypatch.setattr(recompute, "save_on_cpu", lambda **_: hooks(pack, lambda x: x))
    gradients = []
    for offload in (Offload(), OFFLOAD):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 4), nn.Sequential(nn.Linear(4, 7), nn.Tanh())
        )
        plan = Plan(
            backend="ddp", units=("0", "1"), recompute=("none", "full"), offload=offload
        )
        recompute.apply_recompute({"0": model[0], "1": model[1]}, plan)
        model(torch.ones(3, 5)).pow(2).sum().backward()
        gradients.append([value.grad for value in model.parameters()])
    assert moved == [(3, 4)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("backend", ["ddp", "naive"])
def test_the_device_holds_less_and_the_host_more(backend: str) -> None:
    make, batch, loss = matrix.MODELS["gpt"]
    spec = trace(make, batch(2), target="cuda", loss=loss, precision="fp32")
    costs = Costs(spec, cluster("2xA100-80GB"))
    plan = next(iter(BACKENDS.get(backend).layouts(costs)))
    # So many samples that the peak lies where all inputs are kept.
    plan = replace(plan, micro_batch=64, recompute=("full",) * len(spec.units))
    kept = predict(plan, costs)
    moved = predict(replace(plan, offload=OFFLOAD), costs)
    inputs = spec.blocks[0].input_bytes_per_sample * 64 * len(spec.units)
    pairs = zip(kept.ranks, moved.ranks, strict=True)
    assert sum(after.host - before.host for before, after in pairs) == inputs
    assert moved.seconds > kept.seconds
    pairs = zip(kept.ranks, moved.ranks, strict=True)
    saved = [before.allocated - after.allocated for before, after in pairs]
    # The unit that is in its backward at the peak has its own input back.
    most = inputs / len(saved) * (1 - len(saved) / len(spec.units))
    assert all(0 < count <= most for count in saved)


@pytest.mark.parametrize(
    ("offload", "field"),
    [
        (OFFLOAD, "offload.activations"),
        (Offload(parameters="cpu"), "offload.parameters"),
    ],
)
def test_what_is_refused(offload: Offload, field: str) -> None:
    plan = Plan(backend="ddp", units=("0",), offload=offload)
    assert [v.field for v in refusals(BACKENDS.get("ddp"), plan)] == [field]
