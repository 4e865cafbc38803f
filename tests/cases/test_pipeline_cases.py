"""Faults that people met with pipelines; names begin with the case's id."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.errors import InvalidPlanError, raise_if_any
from bigmodel.plans import Mesh, Plan, Stages
from tests.cases.launches import assert_check, checks_of

MODULE, WORLD = "pipeline_checks", 2


@pytest.mark.parametrize("name", checks_of(MODULE))
def test_case(name: str) -> None:
    assert_check(MODULE, WORLD, name)


@pytest.mark.parametrize("stage", [2, 3])
def test_pp_08_hang_15_pipeline_with_zero_2_or_3_is_refused_by_name(stage: int):
    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2, replicate=2),
        units=("0", "1"),
        stages=Stages(schedule="1f1b", cuts=(1,)),
        accumulation=2,
        zero_stage=stage,
    )
    found = list(refusals(BACKENDS.get("pipeline"), plan))
    with pytest.raises(InvalidPlanError, match=rf"zero_stage is {stage}.*'pipeline'"):
        raise_if_any(found, InvalidPlanError)


@pytest.mark.parametrize("schedule", ["interleaved-zb", "zbv", "dualpipev"])
def test_a_split_backward_is_refused_with_data_parallel_ranks(schedule: str):
    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2, replicate=2),
        units=("0", "1", "2", "3"),
        stages=Stages(schedule=schedule, cuts=(1, 2, 3)),
        accumulation=4,
    )
    found = list(refusals(BACKENDS.get("pipeline"), plan))
    assert [violation.field for violation in found] == ["stages.schedule"]
    alone = replace(plan, mesh=Mesh(pipeline=2))
    assert list(refusals(BACKENDS.get("pipeline"), alone)) == []
