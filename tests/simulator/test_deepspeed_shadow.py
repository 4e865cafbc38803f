"""Laws of what the DeepSpeed shadow predicts, on a model made by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.deepspeed.gathering import MAX_LIVE, Coordinator, Weight
from bigmodel.backends.deepspeed.shadow import programs
from bigmodel.backends.deepspeed.zero3_linear import (
    LinearOrder,
    without_weight_copies,
)
from bigmodel.backends.flat_partition import FlatPartition
from bigmodel.backends.walk import BUCKETS, GATHERED, GRADIENTS, steps_of
from bigmodel.clusters import Cluster, Device, Link, Node
from bigmodel.models import (
    Gradient,
    ModelSpec,
    Op,
    Param,
    Phases,
    Placed,
    Storage,
    Tape,
    Unit,
)
from bigmodel.models.size import Size
from bigmodel.plans import DeepSpeedOptions, Mesh, Offload, Plan
from bigmodel.simulator import Costs, Program, Task, simulate
from bigmodel.simulator.program import total
from bigmodel.simulator.segments import HOLDER

WIDTH = 1024
LAYERS = 6
RANKS = 4
DEVICE = Device(
    name="device",
    memory=1 << 40,
    bandwidth=1e12,
    peaks={"float32": 1e14, "bfloat16": 1e15},
    source="made up",
)
CLUSTER = Cluster(
    name="cluster",
    node=Node(device=DEVICE, count=RANKS, link=Link(bandwidth=1e11, latency=1e-5)),
)


def layer(path: str, *, trainable: bool = True) -> Placed:
    weight, bias = WIDTH * WIDTH, WIDTH
    handed = Size(0, WIDTH * 4)
    gradients = [
        event
        for name, elements in (("bias", bias), ("weight", weight))
        for event in (
            Storage(1, Size(elements * 4, 0), "gradient"),
            Gradient(name, elements),
        )
    ]
    phases = Phases(
        forward=Tape(
            (
                Op("matmul", Size(0, 2 * weight), Size(4 * weight, 0), "float32"),
                Storage(1, handed, "activation"),
            )
        ),
        backward=Tape(
            (
                Op("matmul", Size(0, 4 * weight), Size(8 * weight, 0), "float32"),
                *(gradients if trainable else ()),
                Storage(-1, handed, "activation"),
            )
        ),
    )
    unit = Unit(
        params=(
            Param(
                name="weight",
                shape=(WIDTH, WIDTH),
                dtype="float32",
                trainable=trainable,
            ),
            Param(name="bias", shape=(WIDTH,), dtype="float32", trainable=trainable),
        ),
        phases={"none": phases, "full": phases},
        input_bytes_per_sample=WIDTH * 4,
    )
    return Placed(path=path, unit=unit)


MODEL = ModelSpec(
    name="layers",
    sequence=tuple(layer(f"layers.{index}") for index in range(LAYERS)),
    precision="fp32",
    target="cuda",
    sample="x float32[1024]",
    sample_bytes=WIDTH * 4,
    tokens_per_sample=1,
    flops_per_sample=6 * LAYERS * WIDTH * WIDTH,
)


def plan(
    stage: int,
    *,
    ranks: int = RANKS,
    elements: int = 2_000_000,
    options: dict | None = None,
    **fields,
):
    return Plan(
        backend="deepspeed",
        mesh=Mesh(shard=ranks),
        zero_stage=stage,
        units=MODEL.units,
        deepspeed=DeepSpeedOptions(bucket_elements=elements, **(options or {})),
        **fields,
    )


def program(chosen: Plan, model: ModelSpec = MODEL):
    written = min(3, chosen.accumulation)
    found = programs(chosen, Costs(model, CLUSTER), written)
    # Of the fullest rank, where they differ.
    return max(found, key=lambda p: simulate((p,))[0].peak.num_bytes)


def timeline(chosen: Plan, model: ModelSpec = MODEL):
    return simulate((program(chosen, model),))[0]


PLANS = [
    plan(stage, accumulation=accumulation, elements=elements)
    for stage in (1, 2, 3)
    for accumulation in (1, 3)
    for elements in (500_000, 2_000_000, 20_000_000)
]


@pytest.mark.parametrize("chosen", PLANS, ids=lambda p: f"{p.describe()} {p.deepspeed}")
def test_step_ends_as_it_began(chosen):
    changes = sum(total(task.change) for task in program(chosen).tasks)
    assert changes == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_states_shrink_with_the_stage(precision, ranks):
    def states(stage: int) -> int:
        held = dict(program(plan(stage, ranks=ranks, precision=precision)).base)
        # Only stage 3 keeps its bucket and its gradients from step to step.
        return sum(held.values()) - held.get(BUCKETS, 0) - held.get(GRADIENTS, 0)

    assert states(1) >= states(2) >= states(3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_shrink_with_the_ranks(stage):
    few, many = (total(program(plan(stage, ranks=ranks)).base) for ranks in (2, 8))
    assert many < few


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bucket_counts_whatever_the_model_is(stage):
    # Both are larger than the model, so that nothing but the bucket differs.
    small, large = 10_000_000, 50_000_000
    peaks = [
        timeline(plan(stage, elements=elements)).peak.num_bytes
        for elements in (small, large)
    ]
    assert peaks[1] - peaks[0] == (large - small) * 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_layer_needs_less(stage):
    frozen = (layer("layers.0", trainable=False), *MODEL.sequence[1:])
    peaks = [
        timeline(plan(stage), model).peak.num_bytes
        for model in (MODEL, replace(MODEL, sequence=frozen))
    ]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("stage", [1, 2])
def test_reductions_of_the_early_stages_are_exposed(stage):
    result = timeline(plan(stage))
    assert result.waiting == pytest.approx(result.busy["communication"])


def test_stage_3_overlaps():
    # Enough samples for computing to take longer than moving weights.
    result = timeline(plan(3, micro_batch=16_384))
    assert result.waiting < 0.5 * result.busy["communication"]


def test_stage_3_gathers_every_weight_once_where_all_fit():
    gathered = sum(
        dict(task.change)[GATHERED]
        for task in program(plan(3)).tasks
        if task.label == "all-gather weights"
    )
    assert gathered == LAYERS * WIDTH * WIDTH * 4


def test_pieces_of_a_flat_partition():
    partition = FlatPartition({"a": 10, "b": 6, "c": 3}, ranks=2)
    assert (partition.piece, partition.total) == (10, 20)
    assert partition.whole(0) == 10
    assert partition.whole(1) == 9
    assert partition.chunks(["a"], 100) == [(10,)]
    # b and c have one owner and lie side by side, a has another one.
    assert partition.chunks(["c", "b"], 100) == [(9,)]
    assert partition.chunks(["c", "b", "a"], 100) == [(9, 10)]
    assert partition.chunks(["c", "b", "a"], 5) == [(9,), (10,)]
    # Slices that add up to a rank's own piece are not joined.
    assert partition.chunks(["c", "b", "a"], 100, apart=1) == [(3, 6, 10)]
    assert [partition.piece_of(rank, "a") for rank in (0, 1)] == [10, 0]


def test_a_parameter_of_two_owners_counts_whole_for_both():
    partition = FlatPartition({"a": 10, "b": 10, "c": 4}, ranks=2)
    assert partition.whole(0) == 20
    assert partition.whole(1) == 14
    assert [partition.piece_of(rank, "b") for rank in (0, 1)] == [2, 8]
    assert partition.kinds(2) == {0: (0,), 1: (1,)}
    assert partition.kinds(1) == {0: (0,), 1: (1,)}


def test_many_ranks_are_represented_by_the_heaviest_and_the_last():
    params = {"small": 40, "large": 400, "end": 40}
    kinds = FlatPartition(params, ranks=16).kinds(8)
    assert sorted(rank for same in kinds.values() for rank in same) == list(range(16))
    assert set(kinds) == {1, 15}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_every_rank_has_one_program(stage, ranks):
    found = programs(plan(stage, ranks=ranks), Costs(MODEL, CLUSTER), 1)
    covered = sorted(rank for program in found for rank in program.ranks)
    assert covered == list(range(ranks))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_states_leave_the_device(stage):
    here = program(plan(stage))
    away = program(plan(stage, offload=Offload(optimizer="cpu")))
    held = {"fp32 master weights", "optimizer states"}
    assert held <= {kind for kind, _ in here.base}
    assert held <= {kind for kind, _ in away.host}
    assert not held & {kind for kind, _ in away.base}
    assert any(task.stream == "host" and task.seconds for task in away.tasks)
    assert timeline(plan(stage)).peak.num_bytes > simulate((away,))[0].peak.num_bytes


def test_fp32_sums_beside_16_bit_weights_cost_stage_3_two_bytes_a_shard():
    bases = [
        total(program(plan(3, precision="bf16", options=options)).base)
        for options in ({"grad_accum_dtype": "weights"}, {})
    ]
    elements = LAYERS * (WIDTH * WIDTH + WIDTH)
    assert bases[1] - bases[0] == 2 * elements // RANKS


def test_second_shards_are_held_to_the_end_of_the_step():
    options = {"zero_hpz_partition_size": 2}
    changes = [dict(task.change) for task in program(plan(3, options=options)).tasks]
    freed = [change["weights"] for change in changes if change.get("weights", 0) < 0]
    # Half of every weight and bias, in fp32.
    assert freed == [-LAYERS * (WIDTH * WIDTH + WIDTH) // 2 * 4]


REFUSED = {
    "hpz under stage 2": (2, {"zero_hpz_partition_size": 2}, {}, "zero_hpz"),
    "groups that do not divide": (3, {"zero_hpz_partition_size": 3}, {}, "divide"),
    "quantised on a cpu": (3, {"zero_quantized_weights": True}, {}, "kernel for CUDA"),
    "fp32 sums of stage 1": (
        1,
        {"grad_accum_dtype": "float32"},
        {"precision": "bf16"},
        "BF16_Optimizer",
    ),
    "sums of fp32": (2, {"grad_accum_dtype": "float32"}, {}, "fp32 anyway"),
    "parameters of stage 2": (2, {}, {"offload": Offload(parameters="cpu")}, "stage 3"),
    "a disk under stage 2": (
        2,
        {},
        {"offload": Offload(optimizer="disk", folder="/scratch")},
        "stage 3 only",
    ),
    "unused under stage 3": (3, {"find_unused": True}, {}, "stops all of them"),
    "unused with overlap": (
        2,
        {"find_unused": True, "overlap_comm": True},
        {},
        "after backward",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    stage, options, fields, reason = REFUSED[name]
    chosen = plan(stage, options=options, **fields)
    found = list(refusals(BACKENDS.get("deepspeed"), chosen, kind="cpu"))
    assert len(found) == 1
    assert reason in str(found[0])


def test_live_weights_stay_within_their_limit():
    size = 60_000_000
    names = [f"w{index}" for index in range(100)]
    weights = {name: Weight(elements=size, padded=size) for name in names}
    order = [(at, (name,)) for at, name in enumerate((*names, *reversed(names)))]
    coordinator = Coordinator(weights, order)
    visits = coordinator.visits(len(order))
    live = highest = 0
    for visit in visits:
        for event in visit.before:
            if event.kind == "gather":
                live += event.gathering.flat
                highest = max(highest, live)
        live -= sum(visit.released) + sum(visit.weights.values())
    assert live == 0
    assert highest < MAX_LIVE + 2 * size


@pytest.mark.parametrize(
    ("shape", "live"), [((64, 16), 0), ((16, 64), 2048)], ids=["linear", "transposed"]
)
def test_copies_of_weights_under_autocast(shape, live):
    """A matrix of shape (in, out) is no linear layer's, and its copy is kept."""
    weight = Param(name="weight", shape=shape, dtype="float32")
    bias = Param(name="bias", shape=(64,), dtype="float32")
    placed = layer("layers.0")
    placed = replace(placed, unit=replace(placed.unit, params=(weight, bias)))
    copy = ((HOLDER["cast"], 2048),)
    written = Program(tasks=(Task(label="forward", change=copy, surge=copy),))
    steps = steps_of(plan(3), (placed,))
    (task,) = without_weight_copies(written, steps).tasks
    assert total(task.change) == live
    assert total(task.surge) == 2048


def test_shadow_needs_no_torch():
    code = (
        "import sys, bigmodel.backends.deepspeed.shadow;"
        "sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_linear_layer_hands_on_its_weight_first_under_stage_3() -> None:
    """Elsewhere after its bias: it decides when a bucket is full."""
    (step,) = steps_of(plan(3), MODEL.sequence[:1])
    bias, weight = Gradient("bias", WIDTH), Gradient("weight", WIDTH * WIDTH)
    order = LinearOrder([step])
    order.begin()
    assert list(order.turn(step, [bias])) == []
    assert list(order.turn(step, [weight])) == [WIDTH * WIDTH, WIDTH]
    order.begin()
    assert list(order.turn(step, [weight, bias])) == [WIDTH * WIDTH, WIDTH]


def test_gradients_too_large_for_the_bucket_stay_until_their_shards_are_stepped_over():
    """bf16, offloaded: beside a gradient its shard in fp32 and, for the norm, in fp64.

    Seen on 2 CPU processes with weights of 1024 x 1024 and a bucket of 1,000,000.
    """
    weight = WIDTH * WIDTH
    small = plan(
        3,
        ranks=2,
        elements=weight - 1,
        precision="bf16",
        offload=Offload(optimizer="cpu"),
    )
    (program,) = programs(small, Costs(MODEL, CLUSTER), 1)
    at = [task.label for task in program.tasks].index("gradient norm")
    norm, dropped = program.tasks[at], program.tasks[at + 1 :]
    assert total(norm.surge) == weight // 2 * (4 + 8)
    large = [t for t in dropped if t.label == "drop large gradients"]
    assert large[0].change == ((GRADIENTS, -weight * 2),)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_step_may_begin_with_weights_that_come_from_elsewhere(tier: str) -> None:
    away = plan(3, offload=Offload(parameters=tier, optimizer=tier, folder="/scratch"))
    (timeline,) = simulate(programs(away, Costs(MODEL, CLUSTER), 2))
    assert timeline.seconds > 0
