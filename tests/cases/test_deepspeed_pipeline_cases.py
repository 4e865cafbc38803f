"""Faults of pipelines under DeepSpeed's engine: what is refused, and what trains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.plans import DeepSpeedOptions, Mesh, Plan, Stages
from tests.cases.launches import assert_check, checks_of

MODULE = "deepspeed_pipeline_checks"
THREE = "deepspeed_three_stages_checks"
PLAN = Plan(
    backend="deepspeed_pipeline",
    mesh=Mesh(pipeline=2, shard=2),
    units=("0", "1", "2", "3"),
    stages=Stages(schedule="1f1b", cuts=(2,)),
    zero_stage=1,
)


def fields(plan: Plan) -> list[str]:
    return [v.field for v in refusals(BACKENDS.get(plan.backend), plan)]


@pytest.mark.parametrize("stage", [2, 3])
def test_pp_08_deepspeed_pipeline_with_zero_2_or_3_is_refused(stage: int):
    (found,) = refusals(BACKENDS.get(PLAN.backend), replace(PLAN, zero_stage=stage))
    assert found.field == "zero_stage"
    assert "zero_stage=1" in found.cure
    assert "backend 'deepspeed'" in found.cure


def test_pp_08_deepspeed_pipeline_with_zero_1_is_accepted():
    assert fields(PLAN) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stages": Stages(schedule="gpipe", cuts=(2,))}, "stages.schedule"),
        ({"mesh": Mesh(pipeline=2, replicate=2)}, "mesh.replicate"),
        ({"zero_stage": 0}, "mesh.shard"),
        ({"units": ("h.0", "h.1", "h.2", "h.3")}, "units"),
        (
            {
                "zero_stage": 0,
                "mesh": Mesh(pipeline=2, replicate=2),
                "precision": "bf16",
            },
            "zero_stage",
        ),
        ({"precision": "autocast-fp16"}, "precision"),
        (
            {
                "zero_stage": 0,
                "mesh": Mesh(pipeline=4),
                "stages": Stages(schedule="1f1b", cuts=(1, 2, 3)),
                "precision": "autocast",
            },
            "precision",
        ),
        ({"deepspeed": DeepSpeedOptions(overlap_comm=True)}, "deepspeed.overlap_comm"),
        ({"mesh": Mesh(shard=2), "stages": None, "units": ()}, "mesh.pipeline"),
    ],
)
def test_deepspeed_pipeline_refuses(changes, field: str):
    assert fields(replace(PLAN, **changes)) == [field]


@pytest.mark.parametrize("name", checks_of(MODULE))
def test_deepspeed_pipeline(name: str):
    assert_check(MODULE, 2, name)


@pytest.mark.parametrize("name", checks_of(THREE))
def test_deepspeed_pipeline_of_three_stages(name: str):
    assert_check(THREE, 3, name)
