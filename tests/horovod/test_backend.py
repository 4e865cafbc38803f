"""Backend `horovod`: what it accepts and predicts; and what it does, where it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.walk import BUCKETS, GRADIENTS, HOOK
from bigmodel.errors import MissingDependencyError
from bigmodel.plans import HorovodOptions, Mesh, Plan
from bigmodel.running.session import prepare
from bigmodel.simulator import Costs
from bigmodel.units import MIB

PLAN = Plan(backend="horovod", mesh=Mesh(replicate=2), micro_batch=2, accumulation=2)
INSTALLED = find_spec("horovod") is not None
BAD_START = Path(__file__).with_name("silent_rank.py")


def model() -> nn.Module:
    layers = [nn.Linear(64, 64) for _ in range(4)]
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def costs() -> Costs:
    spec = bigmodel.trace(
        model,
        torch.zeros(2, 64),
        precision="fp32",
        loss=lambda output, batch: output.square().mean(),
    )
    return Costs(spec, bigmodel.cluster("2xA100-40GB"))


def held(costs: Costs, plan: Plan) -> dict[str, int]:
    (program,) = BACKENDS.get("horovod").programs(plan, costs, plan.accumulation)
    return dict(program.base)


def with_options(**options) -> Plan:
    return replace(PLAN, horovod=HorovodOptions(**options))


def test_it_holds_the_fusion_buffer_of_the_plan(costs):
    assert held(costs, with_options(fusion_megabytes=128.0))[BUCKETS] == 128 * MIB
    assert held(costs, with_options(fusion_megabytes=2.0))[BUCKETS] == 2 * MIB
    # Too small for two gradients (the biases, of 256 bytes), it is never made.
    assert BUCKETS not in held(costs, with_options(fusion_megabytes=500 / MIB))
    assert BUCKETS not in held(costs, replace(PLAN, mesh=Mesh()))


def test_every_gradient_travels_once_and_nothing_is_left(costs):
    for options in ({}, {"compression": "fp16"}, {"fusion_megabytes": 0.01}):
        (program,) = BACKENDS.get("horovod").programs(with_options(**options), costs, 2)
        left: dict[str, int] = {}
        for task in program.tasks:
            for kind, count in task.change:
                left[kind] = left.get(kind, 0) + count
        assert left.get(GRADIENTS, 0) == 0
        assert left.get(HOOK, 0) == 0
        reductions = [t for t in program.tasks if t.label.startswith("all-reduce")]
        assert len(reductions) >= 4


def test_compression_sends_half_the_bytes(costs):
    def seconds(plan: Plan) -> float:
        (program,) = BACKENDS.get("horovod").programs(plan, costs, 2)
        reduced = [t for t in program.tasks if t.label.startswith("all-reduce")]
        latency = 2 * costs.cluster.node.link.latency * len(reduced)
        return sum(t.seconds for t in reduced) - latency

    whole, half = seconds(PLAN), seconds(with_options(compression="fp16"))
    assert half == pytest.approx(whole / 2, rel=1e-6)


def test_only_replicas_and_no_masters():
    backend = BACKENDS.get("horovod")
    assert list(refusals(backend, PLAN)) == []
    (axis,) = refusals(backend, replace(PLAN, mesh=Mesh(shard=2)))
    assert "only replicates" in axis.rule
    (precision,) = refusals(backend, replace(PLAN, precision="bf16"))
    assert precision.field == "precision"


def test_the_search_offers_it_only_by_name():
    arguments = {
        "precision": "autocast",
        "loss": lambda output, batch: output.square().mean(),
        "cluster": "2xA100-40GB",
        "global_batch": 4,
    }
    assert (
        bigmodel.plan(model, torch.zeros(2, 64), **arguments).plan.backend != "horovod"
    )
    decision = bigmodel.plan(
        model, torch.zeros(2, 64), **arguments, backends=["horovod"]
    )
    assert decision.plan.backend == "horovod"


@pytest.mark.skipif(INSTALLED, reason="horovod is installed")
def test_where_it_is_missing_the_engine_says_so_and_what_to_do():
    plan = Plan(backend="horovod", micro_batch=2)
    with pytest.raises(MissingDependencyError, match=r"main branch .* backend 'ddp'"):
        prepare(plan, model, torch.optim.SGD, lambda output, batch: output.mean())


@pytest.mark.skipif(not INSTALLED, reason="horovod is not installed")
def test_a_silent_rank_is_named():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(BAD_START)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "waited in vain for rank 1, which only came to step 1" in done.stderr
