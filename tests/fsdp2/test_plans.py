"""Plans of FSDP2 without running them: what is refused, what is predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.clusters import Cluster, Device, Link, Node
from bigmodel.errors import InvalidPlanError, UsageError
from bigmodel.plans import Fsdp2Options, Mesh, Offload, Plan, Stages
from bigmodel.search import predict
from bigmodel.simulator import Costs
from bigmodel.simulator.program import total
from bigmodel.units import GIB

WORLD = 4
BLOCKS = 6
WIDTH = 256
ON_HOST = Offload(parameters="cpu", optimizer="cpu")


def make() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


def loss(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


def cluster(host_memory: int = 0) -> Cluster:
    device = Device(
        name="gpu",
        memory=64 * GIB,
        bandwidth=1e12,
        peaks={"float32": 1e14, "bfloat16": 2e14},
        source="a stand-in",
    )
    link = Link(bandwidth=1e11, latency=1e-6)
    return Cluster(
        name="gpus",
        node=Node(device=device, count=WORLD, link=link, host_memory=host_memory),
    )


@pytest.fixture(scope="module")
def costs() -> dict[str, Costs]:
    batch = torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)
    return {
        precision: Costs(
            bigmodel.trace(make, batch, precision=precision, loss=loss), cluster()
        )
        for precision in ("fp32", "bf16")
    }


def plan(costs: Costs, **changes) -> Plan:
    base = Plan(
        backend="fsdp2",
        mesh=Mesh(shard=WORLD),
        precision=costs.model.precision,
        units=costs.model.units,
        optimizer="adamw",
    )
    return replace(base, **changes)


def peak(costs: Costs, **changes) -> int:
    return predict(plan(costs, **changes), costs).fullest.allocated


def test_memory_between_resharding_and_keeping(costs):
    """A smaller group keeps more than all ranks do, and less than everything."""
    policies = (True, 2, False)
    peaks = [
        peak(costs["fp32"], fsdp2=Fsdp2Options(reshard_after_forward=policy))
        for policy in policies
    ]
    assert peaks == sorted(set(peaks)), peaks


@pytest.mark.parametrize("prefetch", [1, 2])
def test_ac_01_the_plan_counts_two_gathers_a_block(costs, prefetch):
    """What two real ranks do in `check_gathers_are_counted`, recomputed or not."""
    for policy, each in ((True, 2), (2, 2), (False, 1)):
        for recompute in ((), ("full",) * BLOCKS):
            options = Fsdp2Options(reshard_after_forward=policy, prefetch=prefetch)
            wanted = plan(costs["fp32"], fsdp2=options, recompute=recompute)
            (program,) = BACKENDS.get("fsdp2").programs(wanted, costs["fp32"], 1)
            gathers = [t for t in program.tasks if t.label.startswith("all-gather")]
            # All parameters are in blocks: the root has none to gather.
            assert len(gathers) == each * BLOCKS


def test_a_deeper_prefetch_holds_more_and_waits_less(costs):
    found = [
        predict(plan(costs["fp32"], fsdp2=Fsdp2Options(prefetch=depth)), costs["fp32"])
        for depth in (1, 2, 4)
    ]
    peaks = [estimate.fullest.allocated for estimate in found]
    assert peaks == sorted(set(peaks)), peaks
    seconds = [estimate.seconds for estimate in found]
    assert seconds == sorted(seconds, reverse=True), seconds


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ga_08_postponing_sends_less_and_holds_whole_gradients(costs, precision):
    """Both are shown: bytes held and seconds of communication."""
    found = {
        postpone: predict(
            plan(
                costs[precision],
                accumulation=3,
                fsdp2=Fsdp2Options(postpone_reduction=postpone),
            ),
            costs[precision],
        )
        for postpone in (False, True)
    }
    more = found[True].fullest.allocated - found[False].fullest.allocated
    elements = costs[precision].model.elements
    # Of P whole gradients in fp32, a shard would have been there anyway.
    assert 0.5 * 4 * elements < more < 1.1 * 4 * elements
    sent = [found[postpone].timelines[0].busy["communication"] for postpone in found]
    assert sent[1] < sent[0]


def test_reducing_in_bfloat16_halves_the_bytes_on_their_way(costs):
    def buckets(reduce_dtype: str) -> int:
        wanted = plan(costs["bf16"], fsdp2=Fsdp2Options(reduce_dtype=reduce_dtype))
        (program,) = BACKENDS.get("fsdp2").programs(wanted, costs["bf16"], 1)
        return sum(
            count
            for task in program.tasks
            if task.label.startswith("reduce-scatter input")
            for _, count in task.change
        )

    assert 2 * buckets("bfloat16") == buckets("float32")


def test_every_program_frees_what_it_allocates(costs):
    for precision in ("fp32", "bf16"):
        for options in (
            Fsdp2Options(),
            Fsdp2Options(reshard_after_forward=2, prefetch=3),
            Fsdp2Options(postpone_reduction=True),
            Fsdp2Options(reshard_after_forward=False, postpone_reduction=True),
            Fsdp2Options(reduce_dtype="bfloat16", postpone_reduction=True),
            Fsdp2Options(ignored=("2",)),
        ):
            for mesh in (Mesh(shard=WORLD), Mesh(replicate=2, shard=2)):
                for offload in (Offload(), ON_HOST):
                    wanted = plan(
                        costs[precision],
                        accumulation=3,
                        fsdp2=options,
                        mesh=mesh,
                        offload=offload,
                    )
                    backend = BACKENDS.get("fsdp2")
                    if list(refusals(backend, wanted)):
                        continue
                    (program,) = backend.programs(wanted, costs[precision], 3)
                    rest = sum(total(task.change) for task in program.tasks)
                    assert rest == 0, (precision, options, mesh, offload, rest)


def test_offloading_moves_shards_into_host_memory(costs):
    held = predict(plan(costs["fp32"]), costs["fp32"]).fullest
    moved = predict(plan(costs["fp32"], offload=ON_HOST), costs["fp32"])
    shard = costs["fp32"].model.elements // WORLD
    # Weights, gradients, and two states of AdamW, in fp32.
    assert moved.fullest.host == 4 * 4 * shard
    assert held.host == 0
    assert held.allocated - moved.fullest.allocated > 2 * 4 * shard
    names = {term.name for term in moved.fullest.terms}
    assert not names & {"weights", "optimizer states", "optimizer step"}
    assert moved.timelines[0].busy["host"] > 0
    assert moved.seconds > predict(plan(costs["fp32"]), costs["fp32"]).seconds


def test_offloading_takes_what_its_link_takes(costs):
    """Weights come twice, gradients go once; nothing else uses the link."""
    wanted = plan(costs["fp32"], offload=ON_HOST)
    (program,) = BACKENDS.get("fsdp2").programs(wanted, costs["fp32"], 1)
    link = cluster().node.host_link
    copies = [
        task
        for task in program.tasks
        if task.stream == "host" and "step" not in task.label
    ]
    elements = costs["fp32"].model.elements
    seconds = sum(task.seconds for task in copies) - len(copies) * link.latency
    assert seconds == pytest.approx(3 * 4 * elements / WORLD / link.bandwidth, rel=0.01)


def test_ignored_parameters_stay_whole(costs):
    sharded = predict(plan(costs["fp32"]), costs["fp32"]).fullest
    options = Fsdp2Options(ignored=("2",))
    mixed = predict(plan(costs["fp32"], fsdp2=options), costs["fp32"]).fullest

    def held(rank, name: str) -> int:
        return sum(term.num_bytes for term in rank.terms if term.name == name)

    block = (WIDTH + 1) * WIDTH
    more = 4 * block * (WORLD - 1) // WORLD
    assert held(mixed, "weights") - held(sharded, "weights") == more
    states = held(mixed, "optimizer states") - held(sharded, "optimizer states")
    assert states == 2 * more


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"fsdp2": Fsdp2Options(reshard_after_forward=3)}, "reshard", "use 2"),
        ({"fsdp2": Fsdp2Options(reshard_after_forward=4)}, "reshard", "use 2"),
        ({"fsdp2": Fsdp2Options(reduce_dtype="bfloat16")}, "reduce_dtype", "fp32"),
        ({"fsdp2": Fsdp2Options(ignored=("9",))}, "ignored", "no parameters there"),
        (
            {"fsdp2": Fsdp2Options(ignored=("2",)), "offload": ON_HOST},
            "ignored",
            "two devices",
        ),
        ({"offload": Offload(parameters="cpu")}, "offload", "together"),
        ({"offload": Offload(optimizer="cpu")}, "offload", "together"),
        (
            {"offload": Offload(parameters="disk", optimizer="disk", folder="x")},
            "offload",
            "CPU's memory",
        ),
        ({"offload": Offload(activations="cpu")}, "activations", "on the device"),
    ],
)
def test_refused(costs, changes, field, words):
    with pytest.raises(UsageError) as caught:
        predict(plan(costs["fp32"], **changes), costs["fp32"])
    assert field in str(caught.value)
    assert words in str(caught.value)


def test_ignored_modules_are_refused_in_half_precision(costs):
    options = Fsdp2Options(ignored=("2",))
    with pytest.raises(UsageError, match="bfloat16 activations"):
        predict(plan(costs["bf16"], fsdp2=options), costs["bf16"])


def test_a_host_without_the_memory_is_refused(costs):
    wanted = plan(costs["fp32"], offload=ON_HOST)
    needed = 4 * 4 * costs["fp32"].model.elements
    backend, model = BACKENDS.get("fsdp2"), costs["fp32"].model
    assert not list(refusals(backend, wanted, model, cluster(needed)))
    (found,) = refusals(backend, wanted, model, cluster(needed - 1))
    assert "host" in found.rule


def test_what_can_never_be_right():
    for options, field in (
        ({"prefetch": 0}, "fsdp2.prefetch"),
        ({"reduce_dtype": "float16"}, "fsdp2.reduce_dtype"),
        ({"ignored": ("",)}, "fsdp2.ignored"),
        ({"methods": (".encode",)}, "fsdp2.methods"),
    ):
        with pytest.raises(InvalidPlanError, match=field):
            Plan(backend="fsdp2", fsdp2=Fsdp2Options(**options))


def test_a_pipeline_refuses_what_its_stages_do_not_do():
    for options in ({"postpone_reduction": True}, {"ignored": ("0",)}):
        wanted = Plan(
            backend="pipeline",
            mesh=Mesh(pipeline=2, shard=2),
            accumulation=2,
            units=("0", "1"),
            stages=Stages(schedule="gpipe", cuts=(1,)),
            fsdp2=Fsdp2Options(**options),
        )
        (found,) = refusals(BACKENDS.get("pipeline"), wanted)
        assert found.field == f"fsdp2.{next(iter(options))}"
