"""The search finds what exhaustive search finds, and says why it left the rest out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.clusters import Cluster
from bigmodel.clusters.notation import from_table
from bigmodel.clusters.overheads import communicator, context
from bigmodel.errors import InvalidPlanError, NothingFitsError, UnknownNameError
from bigmodel.models import ModelSpec
from bigmodel.search import decide, predict
from bigmodel.search.rules import violations
from bigmodel.search.shortfall import explain_shortfall
from bigmodel.search.space import Request, enumerate_plans
from bigmodel.simulator import Costs
from bigmodel.units import MIB, format_bytes


def make_model() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    return nn.Sequential(*(block() for _ in range(6)))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    batch = (torch.zeros(2, 256), torch.zeros(2, 256))
    return bigmodel.trace(
        make_model,
        batch,
        precision="bf16",
        loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]),
    )


def cluster(devices: int, memory: int, launch_seconds: float = 0.0) -> Cluster:
    table = from_table(f"{devices}xA100-40GB")
    device = replace(table.device, memory=memory, launch_seconds=launch_seconds)
    return replace(table, node=replace(table.node, device=device))


def exhaustive(spec: ModelSpec, where: Cluster, batch: int) -> list[float]:
    costs = Costs(spec, where)
    request = Request(
        global_batch=batch,
        optimizer="adamw",
        precision="bf16",
        backends=("ddp", "fsdp2", "deepspeed", "pipeline"),
    )
    estimates = [
        predict(plan, costs)
        for plan in enumerate_plans(costs, request)
        if not list(violations(plan, spec, where))
    ]
    return sorted(e.seconds for e in estimates if e.fits)


@pytest.mark.parametrize("devices", [1, 2, 4, 6])
@pytest.mark.parametrize("spare", [8 * MIB, 20 * MIB, 2000 * MIB])
@pytest.mark.parametrize("batch", [12, 48])
def test_equals_exhaustive_search(spec, devices, spare, batch):
    table = cluster(devices, 2000 * MIB)
    beside = context(table.device).high + 2 * communicator(table.node.link).high
    where = cluster(devices, beside + 40 * MIB + spare)
    expected = exhaustive(spec, where, batch)
    if not expected:
        with pytest.raises(NothingFitsError):
            decide(spec, where, global_batch=batch)
        return
    decision = decide(spec, where, global_batch=batch, keep=4)
    found = [e.seconds for e in (decision.best, *decision.runners_up)]
    assert found == expected[:4]


def test_every_plan_is_accounted_for_and_the_decision_is_repeatable(spec):
    where = cluster(4, 2000 * MIB)
    first = decide(spec, where, global_batch=48)
    second = decide(spec, where, global_batch=48)
    assert first == second
    kept = 1 + len(first.runners_up)
    assert kept + len(first.rejected) == first.considered
    assert all(entry.reason for entry in first.rejected)
    assert first.plan.global_batch == 48
    assert first.plan.world == 4


def test_nothing_fits_says_by_how_much_where_when_what_and_the_cure(spec):
    with pytest.raises(NothingFitsError) as caught:
        decide(spec, cluster(2, 300 * MIB), global_batch=8)
    text = str(caught.value)
    for words in ("too much", "rank", "at the peak", "weights", "would make it fit"):
        assert words in text
    assert caught.value.exit_code == 3


def test_what_would_make_it_fit_was_simulated(spec):
    table = cluster(2, 2000 * MIB)
    (plan,) = (
        entry
        for entry in enumerate_plans(
            Costs(spec, table),
            Request(
                global_batch=2, optimizer="adamw", precision="bf16", backends=("ddp",)
            ),
        )
        if not entry.zero_stage and not entry.recompute
    )
    whole = predict(plan, Costs(spec, table))
    lean = predict(replace(plan, optimizer="sgd"), Costs(spec, table))
    assert lean.high < whole.high
    where = cluster(2, (lean.high + whole.high) // 2)
    text = explain_shortfall([predict(plan, Costs(spec, where))], Costs(spec, where))
    assert f"optimizer sgd: {format_bytes(lean.high)}" in text
    where = cluster(2, 300 * MIB)
    text = explain_shortfall([predict(plan, Costs(spec, where))], Costs(spec, where))
    assert "not by itself, but most of all single changes: " in text


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does(spec):
    with pytest.raises(InvalidPlanError, match="multiple of 4"):
        decide(spec, cluster(4, 2000 * MIB), global_batch=7, backends=["ddp"])


def test_wrong_requests_are_refused(spec):
    where = cluster(2, 2000 * MIB)
    with pytest.raises(InvalidPlanError, match="at least 1"):
        decide(spec, where, global_batch=0)
    with pytest.raises(UnknownNameError, match=r"known: .*adamw"):
        decide(spec, where, global_batch=8, optimizer="adamx")
    with pytest.raises(UnknownNameError, match=r"known: .*ddp"):
        decide(spec, where, global_batch=8, backends=["fdsp"])


def test_a_device_without_bfloat16_refuses_it(spec):
    with pytest.raises(InvalidPlanError, match="does not compute in bfloat16"):
        decide(spec, from_table("2xT4-16GB"), global_batch=8)
