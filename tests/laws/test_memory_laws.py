"""Laws that every predicted peak obeys, whatever the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigmodel.backends.catalog import BACKENDS
from bigmodel.plans import (
    DdpOptions,
    DeepSpeedOptions,
    Fsdp2Options,
    Mesh,
    Plan,
    Stages,
)
from bigmodel.search import predict
from bigmodel.simulator import Costs, simulate
from bigmodel.simulator.program import total

MODELS = ("gpt", "mlp")
PRECISIONS = ("fp32", "bf16")
DDP = DdpOptions(bucket_megabytes=0.1)
DEEPSPEED = DeepSpeedOptions(bucket_elements=20_000)


def plans_of(spec, world: int, accumulation: int = 2) -> dict[str, Plan]:
    """Return a plan of every backend on this many ranks."""
    base = Plan(
        backend="ddp",
        mesh=Mesh(replicate=world),
        micro_batch=2,
        accumulation=accumulation,
        precision=spec.precision,
        units=spec.units,
    )
    sharded = replace(base, backend="fsdp2", mesh=Mesh(shard=world))
    cuts = tuple(len(spec.units) * index // world for index in range(1, world))
    found = {
        "ddp": replace(base, ddp=DDP),
        "ddp, no views": replace(base, ddp=replace(DDP, gradient_views=False)),
        "fsdp2": sharded,
        "fsdp2, keep": replace(
            sharded, fsdp2=Fsdp2Options(reshard_after_forward=False)
        ),
        **{
            f"zero {stage}": replace(
                sharded, backend="deepspeed", zero_stage=stage, deepspeed=DEEPSPEED
            )
            for stage in (1, 2, 3)
        },
        "gpipe": replace(
            base,
            backend="pipeline",
            mesh=Mesh(pipeline=world),
            stages=Stages(schedule="gpipe", cuts=cuts),
        ),
    }
    if world == 4:
        inside = {
            "ddp": Mesh(pipeline=2, replicate=2),
            "fsdp2": Mesh(pipeline=2, shard=2),
        }
        found |= {
            f"1f1b with {name}": replace(
                base,
                backend="pipeline",
                mesh=mesh,
                stages=Stages(schedule="1f1b", cuts=(len(spec.units) // 2,)),
            )
            for name, mesh in inside.items()
        }
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
# Recomputed, Llama's first block keeps other parts of what it is handed.
@pytest.mark.parametrize("model", [*MODELS, "llama"])
def test_a_step_leaves_no_byte_behind(specs, cluster_of, model, precision):
    spec = specs[model, precision]
    for world in (2, 4):
        costs = Costs(spec, cluster_of(world))
        for name, plan in plans_of(spec, world).items():
            for policy in ("none", "selective", "full"):
                policies = (policy,) * len(spec.units)
                chosen = replace(plan, recompute=policies)
                programs = BACKENDS.get(plan.backend).programs(chosen, costs, 2)
                for program in programs:
                    left = sum(total(task.change) for task in program.tasks)
                    # DeepSpeed and FSDP2 round shards up to whole elements.
                    assert abs(left) <= 64, (name, policy, left)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_more_shards_never_need_more_memory(specs, cluster_of, model, precision):
    spec = specs[model, precision]
    for name in plans_of(spec, 2):
        if name in ("ddp", "ddp, no views"):
            continue
        peaks = []
        for world in (2, 4, 8):
            plan = plans_of(spec, world, accumulation=8)[name]
            estimate = predict(plan, Costs(spec, cluster_of(world)))
            peaks.append(max(rank.allocated for rank in estimate.ranks))
        assert peaks == sorted(peaks, reverse=True), (name, peaks)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_higher_zero_stage_holds_no_more_states(specs, cluster_of, model, precision):
    spec = specs[model, precision]
    plans, costs = plans_of(spec, 4), Costs(spec, cluster_of(4))
    held = []
    for stage in (1, 2, 3):
        plan = plans[f"zero {stage}"]
        # Ranks differ in gradients only.
        program = BACKENDS.get("deepspeed").programs(plan, costs, 2)[0]
        states = {"weights", "optimizer states", "fp32 master weights"}
        held.append(sum(count for name, count in program.base if name in states))
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_more_recomputation_needs_no_more_memory(specs, cluster_of, model, precision):
    spec = specs[model, precision]
    costs, count = Costs(spec, cluster_of(4)), len(spec.units)
    for name, plan in plans_of(spec, 4).items():
        peaks = []
        for units in range(0, count + 1, 2):
            policies = ("full",) * units + ("none",) * (count - units)
            estimate = predict(replace(plan, recompute=policies), costs)
            peaks.append(max(rank.allocated for rank in estimate.ranks))
        assert peaks == sorted(peaks, reverse=True), (name, peaks)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_terms_and_seconds_add_up(specs, cluster_of, model, precision):
    spec = specs[model, precision]
    costs = Costs(spec, cluster_of(4))
    for name, plan in plans_of(spec, 4).items():
        estimate = predict(plan, costs)
        for rank in estimate.ranks:
            assert sum(t.num_bytes for t in rank.terms) == rank.device_total, name
            assert rank.allocated <= rank.reserved <= rank.device_total
        parts = estimate.compute_seconds + estimate.exposed_seconds
        assert parts == pytest.approx(estimate.seconds)
        assert estimate.exposed_seconds >= 0
        assert estimate.low <= estimate.fullest.device_total <= estimate.high


@pytest.mark.parametrize("model", MODELS)
def test_memory_and_time_grow_with_the_micro_batch(specs, cluster_of, model):
    spec = specs[model, "bf16"]
    costs = Costs(spec, cluster_of(4))
    for name, plan in plans_of(spec, 4).items():
        small, large = (
            predict(replace(plan, micro_batch=size), costs) for size in (2, 4)
        )
        assert small.fullest.allocated < large.fullest.allocated, name
        assert small.seconds <= large.seconds, name


@pytest.mark.parametrize("model", MODELS)
def test_seconds_of_many_micro_batches_equal_all_written_out(specs, cluster_of, model):
    spec = specs[model, "bf16"]
    costs = Costs(spec, cluster_of(4))
    for name, plan in plans_of(spec, 4, accumulation=24).items():
        shortened = predict(plan, costs).seconds
        programs = BACKENDS.get(plan.backend).programs(plan, costs, 24)
        whole = max(timeline.seconds for timeline in simulate(programs))
        assert shortened == pytest.approx(whole, rel=0.01), name
