"""Faults that people met while training with other tools: right here."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

import bigmodel
from bigmodel.backends.recompute import recompute
from bigmodel.errors import OutOfMemoryError, UsageError
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.running.random_state import seed_of_rank
from bigmodel.running.session import prepare
from tests.cases.launches import assert_check, checks_of, folder_of_launch
from tests.cases.subjects import SGD, Scale, mean_output

CHECKS = "loss_checks+data_checks+engine_checks+fairscale_checks+sum_checks"


@pytest.mark.parametrize("name", checks_of(CHECKS))
def test_on_two_ranks(name: str) -> None:
    assert_check(CHECKS, 2, name)


class Moody(nn.Module):
    """Returns fewer rows, or other values, with every call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = kind
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output = self.layer(x)
        if self.kind == "rows":
            return output[: len(output) - self.calls]
        return output * self.calls if self.kind == "values" else output


@pytest.mark.parametrize(
    ("kind", "what"), [("rows", "shape (7, 4)"), ("values", "values differ")]
)
def test_ac_03_a_block_that_differs_when_recomputed_is_named(kind, what):
    plan = Plan(
        backend="ddp", micro_batch=8, units=("0", "1"), recompute=("full", "full")
    )
    block = nn.Sequential(nn.Linear(4, 4), Moody(kind))
    with (
        prepare(
            plan, nn.Sequential(nn.Linear(4, 4), block), torch.optim.SGD, square
        ) as engine,
        pytest.raises(UsageError) as caught,
    ):
        engine.step(torch.randn(8, 4))
    text = str(caught.value)
    assert "1.1 (Moody)" in text
    assert what in text
    assert "unit '1'" in text


def test_ac_03_plain_blocks_pass_and_are_left_as_they_were():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
    )
    units = tuple("0123")
    results = []
    for policies in ((), ("full",) * 4):
        plan = Plan(backend="ddp", micro_batch=8, units=units, recompute=policies)
        with prepare(plan, copy.deepcopy(plain), torch.optim.SGD, square) as engine:
            for _ in range(2):
                engine.step(torch.ones(8, 4) * torch.arange(8)[:, None])
            results.append(engine.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def square(output: Tensor, batch) -> Tensor:
    return output.square().mean()


def test_ac_05_recompute_under_autocast():
    """A layer that is used twice: gradients equal those without recompute, bitwise."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(1)
        layer = nn.Linear(8, 8)
        block = Twice(layer)
        if recomputed:
            recompute(block, "full")
        with torch.autocast("cpu", torch.bfloat16):
            loss = block(x).float().square().mean()
        loss.backward()
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_data_06_one_process_goes_on_where_two_stopped():
    """A checkpoint of two ranks says where in the epoch one rank has to begin."""
    assert_check(CHECKS, 2, "data_06_another_plan_goes_on_in_the_middle")
    folder = folder_of_launch(CHECKS) / "data-06"
    data = list(torch.arange(24.0))
    plan = Plan(backend="ddp", micro_batch=4)
    with prepare(plan, nn.Linear(1, 1), torch.optim.SGD, square) as engine:
        iterator = engine.batches(data, seed=5, epochs=1, start=folder)
        rest = torch.cat(list(iterator))
        before = torch.cat(list(islice(engine.batches(data, seed=5), 2)))
        assert engine.position is not None
    # 2 steps of 4 samples were done: each of the 24 comes once.
    assert len(rest) == 16
    assert sorted(torch.cat([before, rest]).tolist()) == [float(x) for x in data]


def test_ac_06_no_two_ranks_draw_the_same_numbers():
    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2, replicate=3),
        units=("0", "1"),
        stages=Stages(schedule="1f1b", cuts=(1,)),
    )
    seeds = [seed_of_rank(plan, rank, 7) for rank in range(6)]
    assert sorted(seeds) == list(range(7, 13))
    firsts = [rank for rank in range(6) if plan.mesh.stage(rank) == 0]
    alone = Plan(backend="ddp", mesh=Mesh(replicate=3))
    # Without stages the same data ranks begin at the same numbers.
    assert [seed_of_rank(alone, r, 7) for r in range(3)] == [seeds[r] for r in firsts]


class Wide(nn.Module):
    """One unit whose activations are far more than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 4)
        self.error: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.first(x).sigmoid().exp().sin()


def test_cfg_05_too_large_a_batch_is_split_and_the_global_one_kept():
    """Not by trial, rank by rank, but in the plan, which is the same on all of them."""
    spec = bigmodel.trace(
        Wide, torch.randn(2, 65536, 16), loss=square, precision="fp32", target="cpu"
    )
    mesh, roomy = Mesh(replicate=2), bigmodel.cluster("2xcpu")
    eight, four = (
        bigmodel.estimate(
            spec,
            cluster=roomy,
            plan=Plan(backend="ddp", mesh=mesh, micro_batch=size, accumulation=parts),
        )
        for size, parts in ((8, 1), (4, 2))
    )
    memory = (eight.high + four.high) // 2
    device = replace(roomy.node.device, memory=memory)
    tight = replace(roomy, node=replace(roomy.node, device=device))
    found = bigmodel.plan(
        spec, cluster=tight, global_batch=16, precision="fp32", backends=["ddp"]
    ).plan
    assert (found.micro_batch, found.accumulation) == (4, 2)
    assert found.global_batch == 16


def test_cfg_05_other_errors_pass():
    model, plan = Wide(), Plan(backend="ddp", micro_batch=8)
    with prepare(plan, model, torch.optim.SGD, square) as engine:
        model.error = ValueError("not about memory")
        with pytest.raises(ValueError, match="not about memory"):
            engine.step(torch.ones(8, 16))
        model.error = torch.OutOfMemoryError("no bytes left")
        with pytest.raises(OutOfMemoryError, match=r"smaller micro-batch.*no bytes"):
            engine.step(torch.ones(8, 16))


@pytest.mark.parametrize("backend", ["ddp", "naive", "dataparallel"])
def test_mp_03_one_process_adds_up_micro_batches_in_fp32(backend):
    """512 ones; bfloat16 ends at 256."""
    plan = Plan(backend=backend, precision="bf16", micro_batch=2, accumulation=512)
    if backend != "ddp":
        plan = replace(plan, devices_per_process=2)
    if backend == "naive":
        stages = Stages(schedule="naive", cuts=(1,))
        plan = replace(plan, units=("0", "1"), stages=stages)
    model = nn.Sequential(Scale(), Scale())
    x = torch.full((1024, 1), 512.0)
    with prepare(plan, model, SGD, mean_output) as engine:
        engine.step((x, torch.zeros(1024)))
        assert float(engine.state_dict()["0.w"]) == 1 - 512
