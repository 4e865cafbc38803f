"""Policy `selective`: the same training, less memory, no products again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.memory_accuracy import cases as matrix
from benchmarks.memory_accuracy.__main__ import costs_of
from bigmodel import Mesh, Plan, prepare
from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.errors import InvalidPlanError
from bigmodel.models import Op

POLICIES = ("none", "selective", "full")


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_losses_are_those_without_recomputation(precision):
    units = matrix.units_of("gpt")
    torch.manual_seed(0)
    batch = matrix.gpt_batch(4)
    losses = {}
    for policy in POLICIES:
        plan = Plan(
            backend="ddp",
            units=units,
            recompute=(policy,) * len(units),
            precision=precision,
            micro_batch=2,
            accumulation=2,
        )
        engine = prepare(plan, matrix.gpt, partial(torch.optim.SGD, lr=0.1))
        losses[policy] = [float(engine.step(batch).loss) for _ in range(3)]
        engine.close()
    assert losses["selective"] == pytest.approx(losses["none"], rel=1e-6)
    assert losses["full"] == pytest.approx(losses["none"], rel=1e-6)


def test_it_keeps_less_than_all_and_runs_no_product_again():
    block = costs_of("gpt", "fp32").model.blocks[1]
    kept = {p: block.phases[p].forward.net(4) for p in POLICIES}
    assert kept["full"] < kept["selective"] < kept["none"]

    def products(policy: str) -> int:
        ops = (e for e in block.phases[policy].backward.events if isinstance(e, Op))
        return sum(op.kind == "matmul" for op in ops)

    assert products("selective") == products("none") < products("full")


def test_what_cannot_tell_operators_apart_is_refused():
    plan = Plan(backend="ddp", units=("0", "1"), recompute=("selective", "none"))
    with pytest.raises(InvalidPlanError, match="compiled units show no operators"):
        replace(plan, compile=True)
    sharded = replace(plan, backend="deepspeed", mesh=Mesh(shard=2))
    for stage, refused in ((2, False), (3, True)):
        staged = replace(sharded, zero_stage=stage)
        found = refusals(BACKENDS.get("deepspeed"), staged)
        assert any(each.field == "recompute" for each in found) == refused
