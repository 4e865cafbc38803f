"""What is predicted of pipelines, and what is refused with a split backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.backends.catalog import BACKENDS
from bigmodel.clusters import Cluster, Device, Link, Node
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.schedules import SCHEDULES
from bigmodel.search import predict
from bigmodel.simulator import Costs, simulate

UNITS = tuple(str(index) for index in range(8))
LINK = Link(bandwidth=1e9, latency=1e-5)


@pytest.fixture(scope="module")
def costs() -> Costs:
    device = Device(
        name="cpu",
        kind="cpu",
        memory=10**10,
        bandwidth=1e10,
        peaks={"float32": 1e11},
        source="a stand-in",
    )
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in UNITS))
    batch = (torch.randn(2, 16), torch.randn(2, 16))
    spec = bigmodel.trace(
        model,
        batch,
        loss=lambda output, b: nn.functional.mse_loss(output, b[1]),
        precision="fp32",
        target="cpu",
    )
    cluster = Cluster(name="2xcpu", node=Node(device=device, count=2, link=LINK))
    return Costs(spec, cluster)


def plan_for(schedule: str, accumulation: int = 32, **fields) -> Plan:
    ranks = fields.get("mesh", Mesh(pipeline=2)).pipeline
    laps = 1 if SCHEDULES.get(schedule).placement == "one" else 2
    cuts = tuple(range(8 // (laps * ranks), 8, 8 // (laps * ranks)))
    fields.setdefault("mesh", Mesh(pipeline=2))
    return Plan(
        backend="pipeline",
        micro_batch=64,
        accumulation=accumulation,
        units=UNITS,
        stages=Stages(schedule=schedule, cuts=cuts),
        **fields,
    )


@pytest.mark.parametrize("schedule", SCHEDULES.names())
def test_few_micro_batches_stand_for_many(costs: Costs, schedule: str):
    plan = plan_for(schedule)
    estimate = predict(plan, costs)
    whole = simulate(BACKENDS.get("pipeline").programs(plan, costs, 32), spans=False)
    for rank, timeline in zip(estimate.ranks, whole, strict=True):
        # Never below, and above only where a moment before the last ones is the worst.
        assert 0 <= rank.allocated / timeline.peak.num_bytes - 1 < 0.01
    assert estimate.seconds == pytest.approx(max(t.seconds for t in whole), rel=1e-3)


def test_gpipe_keeps_every_micro_batch_and_1f1b_does_not(costs: Costs):
    def activations(schedule: str, accumulation: int) -> int:
        estimate = predict(plan_for(schedule, accumulation), costs)
        terms = estimate.ranks[0].terms
        return next(t.num_bytes for t in terms if t.name == "activations")

    assert activations("1f1b", 64) == activations("1f1b", 16)
    grown = activations("gpipe", 64) - activations("gpipe", 16)
    # Inputs of the last three of the stage's four layers, and its output.
    assert grown == 48 * 4 * 64 * 16 * 4


SPLIT = [name for name, entry in SCHEDULES if entry.splits_backward]


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_a_split_backward_is_refused_with_data_parallel_ranks(schedule: str, axis: str):
    plan = plan_for(schedule, mesh=Mesh(pipeline=2, **{axis: 2}))
    found = list(BACKENDS.get("pipeline").violations(plan, None, None))
    assert [v.field for v in found] == ["stages.schedule"]
    assert "2 data-parallel ranks" in found[0].rule


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_split_backward_is_refused_with_recomputation(schedule: str):
    plan = plan_for(schedule, recompute=("full",) * 8)
    (found,) = BACKENDS.get("pipeline").violations(plan, None, None)
    assert found.field == "recompute"
    assert "once" in found.rule


def test_every_schedule_is_offered_where_it_can_run(costs: Costs):
    layouts = list(BACKENDS.get("pipeline").layouts(costs))
    assert {p.stages.schedule for p in layouts if p.stages} == set(SCHEDULES.names())
    for layout in layouts:
        plan = replace(layout, accumulation=8)
        assert not list(BACKENDS.get("pipeline").violations(plan, costs.model, None))
