"""The engine in one process: arguments, errors, checkpoints."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bigmodel.errors import InvalidPlanError, UnknownNameError, UsageError
from bigmodel.plans import Plan
from bigmodel.plans.document import save
from bigmodel.running.plan_argument import as_plan
from bigmodel.running.session import prepare

PLAN = Plan(backend="ddp", micro_batch=2, accumulation=2)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def adam(params):
    return torch.optim.AdamW(params, lr=0.01)


def loss(output, batch):
    return (output - batch[1]).square().mean()


def points(count: int = 4):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(count, 4, generator=generator),
        torch.randn(count, 1, generator=generator),
    )


def test_trains_and_leaves_the_group():
    before = dict(os.environ)
    with prepare(PLAN, make_model, adam, loss, clip_norm=1.0) as engine:
        data = list(zip(*points(40), strict=True))
        losses = [float(engine.step(b).loss) for b in engine.batches(data, epochs=6)]
        assert len(losses) == 60
        assert sum(losses[-10:]) < sum(losses[:10])
        assert engine.steps == 60
    assert not dist.is_initialized()
    # accelerate takes LOCAL_RANK for a launcher's, and would start a group.
    assert dict(os.environ) == before


def test_keeps_a_group_it_did_not_make():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with prepare(PLAN, make_model, adam, loss) as engine:
            engine.step(points())
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_checkpoint_goes_on_as_before(tmp_path, backend, precision):
    plan = Plan(backend=backend, micro_batch=2, accumulation=2, precision=precision)
    with prepare(plan, make_model, adam, loss) as engine:
        for _ in range(2):
            engine.step(points())
        engine.save(tmp_path)
        engine.step(points())
        expected = engine.state_dict()
        assert {value.dtype for value in expected.values()} == {torch.float32}
    with prepare(plan, make_model, adam, loss, seed=1) as engine:
        engine.load(tmp_path)
        assert engine.steps == 2
        engine.step(points())
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_saving_before_the_first_step_changes_nothing(tmp_path, backend):
    plan = replace(PLAN, backend=backend)
    weights = []
    for saves in (False, True):
        torch.manual_seed(0)
        with prepare(plan, make_model, adam, loss) as engine:
            if saves:
                engine.save(tmp_path)
            engine.step(points())
            weights.append(engine.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_refuses_the_checkpoint_of_another_model_or_optimizer(tmp_path):
    with prepare(PLAN, make_model, adam, loss) as engine:
        engine.save(tmp_path)
    with (
        prepare(PLAN, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1)), adam) as engine,
        pytest.raises(UsageError) as caught,
    ):
        engine.load(tmp_path)
    assert "model.0.weight is 8 x 4, not 6 x 4" in str(caught.value)
    assert "model.1.weight is not in it" in str(caught.value)
    with (
        prepare(PLAN, make_model, partial(torch.optim.SGD, momentum=0.9)) as engine,
        pytest.raises(UsageError, match=r"0\.weight\.momentum_buffer is not in it"),
    ):
        engine.load(tmp_path)
    (tmp_path / "plan.json").unlink()
    with (
        prepare(PLAN, make_model, adam, loss) as engine,
        pytest.raises(UsageError, match="no complete checkpoint"),
    ):
        engine.load(tmp_path)


def test_a_place_in_a_stream_is_not_dealt_out_anew(tmp_path):
    def stream():
        while True:
            yield points(2)

    with prepare(PLAN, make_model, adam, loss) as engine:
        engine.step(next(engine.batches(stream())))
        engine.save(tmp_path)
    other = Plan(backend="fsdp2", micro_batch=2, accumulation=1)
    with prepare(other, make_model, adam, loss) as engine:
        engine.load(tmp_path)
        with pytest.raises(UsageError, match=r"2 micro-batches of 2 .* start="):
            engine.batches(stream())
        engine.step(next(engine.batches(stream(), start=1)))
    alike = Plan(backend="fsdp2", micro_batch=2, accumulation=2, precision="bf16")
    with prepare(alike, make_model, adam, loss) as engine:
        engine.load(tmp_path)
        engine.step(next(engine.batches(stream())))
        assert engine.steps == 2


def test_wrong_size():
    with (
        prepare(PLAN, make_model, adam, loss) as engine,
        pytest.raises(UsageError, match=r"batch is 3; .* gives 4 a step"),
    ):
        engine.step(points(3))


def test_optimizer_left_out_parameters_are_frozen():
    model = make_model()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].bias]}, {"params": model[2].parameters(), "lr": 0.5}]
    )
    with prepare(PLAN, model, optimizer, loss) as engine:
        engine.step(points())
        state = engine.state_dict()
    assert torch.equal(state["0.weight"], before)
    assert not torch.equal(state["0.bias"], torch.zeros(8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"plan": Plan(backend="dpp")}, UnknownNameError, "did you mean 'ddp'"),
        ({"plan": Plan(backend="deepspeed")}, InvalidPlanError, "needs a ZeRO stage"),
        ({"plan": 3}, UsageError, "a int is no plan"),
        ({"model": lambda: 3}, UsageError, "returned a int"),
        ({"model": nn.Linear(1, 1, device="meta")}, UsageError, "have no values"),
        ({"optimizer": 3}, UsageError, "a int is no optimizer"),
        ({"optimizer": adam(make_model().parameters())}, UsageError, "does not have"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = {"plan": PLAN, "model": make_model(), "optimizer": adam, **change}
    with pytest.raises(error, match=message):
        prepare(**arguments, loss=loss)
    assert not dist.is_initialized()


def test_optimizer_that_has_stepped():
    model = make_model()
    optimizer = adam(model.parameters())
    model(points()[0]).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match="already stepped"):
        prepare(PLAN, model, optimizer, loss)


def test_no_loss():
    with (
        prepare(PLAN, make_model, adam) as engine,
        pytest.raises(UsageError, match="holds no loss"),
    ):
        engine.step(points()[0])


def test_what_stands_for_a_plan(tmp_path):
    path = save(PLAN, tmp_path / "plan.json")
    for source in (
        PLAN,
        path,
        str(path),
        SimpleNamespace(plan=PLAN),
        SimpleNamespace(best=PLAN),
        SimpleNamespace(best=SimpleNamespace(plan=PLAN)),
    ):
        assert as_plan(source) == PLAN
