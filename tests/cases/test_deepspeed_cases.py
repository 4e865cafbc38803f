"""Faults that people met with DeepSpeed; names begin with the case's id."""

from __future__ import annotations

import pytest

from bigmodel.backends.deepspeed.conflicts import check_config, conflicts
from bigmodel.errors import InvalidPlanError
from bigmodel.plans import Mesh, Plan
from tests.cases.launches import assert_check, checks_of

MODULE, WORLD = "deepspeed_checks", 2
PLAN = Plan(backend="deepspeed", mesh=Mesh(shard=2), zero_stage=2, micro_batch=8)


@pytest.mark.parametrize("name", checks_of(MODULE))
def test_case(name: str) -> None:
    assert_check(MODULE, WORLD, name)


def test_cfg_01_only_what_differs_as_a_number_is_a_conflict():
    given = {
        "train_micro_batch_size_per_gpu": "8",
        "gradient_clipping": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2.0, "overlap_comm": "false"},
    }
    with pytest.raises(InvalidPlanError) as error:
        check_config(given, PLAN, clip_norm=1.0, learning_rate=1e-5)
    (found,) = error.value.violations
    assert (found.field, found.got) == ("optimizer.params.lr", 1e-4)


def test_cfg_01_all_conflicts_are_listed_at_once():
    given = {"zero_optimization": {"stage": 3}, "train_batch_size": 8}
    with pytest.raises(InvalidPlanError) as error:
        check_config(given, PLAN)
    fields = {found.field for found in error.value.violations}
    assert fields == {"zero_optimization.stage", "train_batch_size"}


def test_cfg_03_what_is_left_at_auto_is_refused_with_its_path():
    given = {"zero_optimization": {"stage": "auto"}, "train_batch_size": "auto"}
    with pytest.raises(InvalidPlanError) as error:
        check_config(given, PLAN)
    fields = {found.field for found in error.value.violations}
    assert fields == {"zero_optimization.stage", "train_batch_size"}
    assert not list(conflicts(given, {"train_batch_size": 16}))
