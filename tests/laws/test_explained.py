"""What an explanation of an estimate promises, for every layout of every backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from bigmodel.backends.catalog import BACKENDS
from bigmodel.errors import UsageError
from bigmodel.plans import Mesh, Plan
from bigmodel.search import predict
from bigmodel.search.measures import find_measures, neighbours
from bigmodel.search.rules import violations
from bigmodel.simulator import Costs

WORLD = 4


def layouts(costs: Costs) -> Iterator[Plan]:
    """Yield every layout of every backend, with recomputation of none and of half."""
    count = len(costs.model.units)
    half = tuple("full" if index % 2 else "none" for index in range(count))
    for _, backend in BACKENDS:
        for layout in backend.layouts(costs):
            for recompute in ((), half):
                plan = replace(
                    layout,
                    micro_batch=WORLD,
                    accumulation=WORLD,
                    precision=costs.model.precision,
                    recompute=recompute,
                )
                if not any(violations(plan, costs.model, costs.cluster)):
                    yield plan


@pytest.fixture(scope="module", params=[("gpt", "bf16"), ("mlp", "fp32")], ids=str)
def costs(specs, cluster_of, request) -> Costs:
    return Costs(specs[request.param], cluster_of(WORLD))


def test_units_and_numbers_add_up_for_every_layout(costs):
    seen = 0
    for plan in layouts(costs):
        estimate = predict(plan, costs)
        for rank in estimate.ranks:
            seen += 1
            of_kinds: dict[str, int] = {}
            for unit in rank.units:
                assert all(count > 0 for _, count in unit.holders), plan.describe()
                for kind, count in unit.holders:
                    of_kinds[kind] = of_kinds.get(kind, 0) + count
            assert sum(of_kinds.values()) == rank.allocated, plan.describe()
            terms = {term.name: term.num_bytes for term in rank.terms}
            assert of_kinds.items() <= terms.items(), plan.describe()
            _is_nested(rank)
        totals = [rank.intervals[-1] for rank in estimate.ranks]
        assert estimate.high == max(interval.high for interval in totals)
        assert estimate.low == max(interval.low for interval in totals)
    assert seen > 40


def _is_nested(rank) -> None:
    numbers = (rank.allocated, rank.reserved, rank.device_total)
    assert tuple(interval.likely for interval in rank.intervals) == numbers
    for interval in rank.intervals:
        assert interval.low <= interval.likely <= interval.high
    for smaller, larger in pairwise(rank.intervals):
        assert smaller.low <= larger.low
        assert smaller.likely <= larger.likely
        assert smaller.high <= larger.high


def test_whole_weights_and_kept_inputs_are_those_of_the_unit(specs, cluster_of):
    spec = specs["gpt", "fp32"]
    plan = Plan(
        backend="ddp",
        mesh=Mesh(replicate=2),
        micro_batch=8,
        units=spec.units,
        recompute=("full",) * len(spec.units),
    )
    rank = predict(plan, Costs(spec, cluster_of(2))).fullest
    held = {unit.unit: dict(unit.holders) for unit in rank.units}
    for path, block in zip(spec.units, spec.blocks, strict=True):
        assert held[path]["weights"] == 4 * block.elements
    # The last one runs again, those before it wait with what they were given.
    assert rank.moment.endswith(spec.units[-1])
    for path, block in zip(spec.units[:-1], spec.blocks, strict=False):
        assert held[path]["activations"] == 8 * block.input_bytes_per_sample


def test_a_measure_saves_the_difference_of_two_predictions(costs):
    for plan in (
        Plan(
            backend=backend,
            mesh=mesh,
            zero_stage=stage,
            micro_batch=4,
            accumulation=2,
            precision=costs.model.precision,
            units=costs.model.units,
        )
        for backend, mesh, stage in (
            ("ddp", Mesh(replicate=WORLD), 0),
            ("fsdp2", Mesh(replicate=2, shard=2), 0),
            ("deepspeed", Mesh(shard=WORLD), 1),
        )
    ):
        before = predict(plan, costs)
        found = find_measures(before, costs)
        assert len(found) >= 6
        saved = [measure.saved_device_total for measure in found]
        assert saved == sorted(saved, reverse=True)
        for measure in found:
            assert measure.plan != plan
            assert measure.plan.global_batch == plan.global_batch
            after = predict(measure.plan, Costs(costs.model, costs.cluster))
            was, now = before.fullest, after.fullest
            assert measure.saved_allocated == was.allocated - now.allocated
            assert measure.saved_device_total == was.device_total - now.device_total
            assert measure.seconds == after.seconds
            assert measure.fits == after.fits


def test_the_neighbours_of_a_plan_change_one_thing_and_go_up(specs, cluster_of):
    spec = specs["gpt", "bf16"]
    costs = Costs(spec, cluster_of(WORLD))
    plan = Plan(
        backend="ddp",
        mesh=Mesh(replicate=WORLD),
        micro_batch=6,
        precision="bf16",
        units=spec.units,
    )
    names = [name for name, _ in neighbours(plan, costs)]
    for words in (
        "recompute full, every second unit",
        "recompute full, all units",
        f"ddp ZeRO-1 [replicate {WORLD}]",
        f"deepspeed ZeRO-2 [shard {WORLD}]",
        f"deepspeed ZeRO-3 [shard {WORLD}]",
        f"fsdp2 no reshard [shard {WORLD}]",
        f"fsdp2 reshard [shard {WORLD}]",
        "micro-batch 3 x 2",
        "optimizer sgd",
    ):
        assert words in names
    assert len(set(names)) == len(names)
    # DDP refuses to offload.
    assert not [name for name in names if name.endswith("on cpu")]
    last = replace(
        plan,
        backend="deepspeed",
        mesh=Mesh(shard=WORLD),
        zero_stage=3,
        micro_batch=1,
        optimizer="sgd",
        recompute=("full",) * len(spec.units),
    )
    moved = [name for name, _ in neighbours(last, costs)]
    assert moved == [
        "optimizer on cpu",
        "optimizer and parameters on cpu",
        "activations on cpu",
    ]


def test_any_rank_has_its_entry_and_another_is_a_mistake(specs, cluster_of):
    spec = specs["gpt", "fp32"]
    costs = Costs(spec, cluster_of(WORLD))
    layout = next(
        plan
        for plan in BACKENDS.get("pipeline").layouts(costs)
        if plan.mesh.pipeline == 2 and plan.mesh.shard == 2
    )
    estimate = predict(replace(layout, accumulation=WORLD), costs)
    for entry, timeline in zip(estimate.ranks, estimate.timelines, strict=True):
        assert estimate.timeline_of(entry) is timeline
        for rank in entry.ranks:
            assert estimate.of_rank(rank) is entry
    with pytest.raises(UsageError, match="rank is 4; the plan has 4 ranks, 0 to 3"):
        estimate.of_rank(WORLD)


def test_a_search_looks_at_no_units(specs, cluster_of):
    spec = specs["mlp", "fp32"]
    plan = Plan(backend="ddp", mesh=Mesh(replicate=2), units=spec.units)
    estimate = predict(plan, Costs(spec, cluster_of(2)), spans=False)
    assert [rank.units for rank in estimate.ranks] == [()]
