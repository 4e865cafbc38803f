"""Tools that are formulas, on models small enough to do by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from benchmarks.against_others import (
    accelerate_estimator,
    bigmodel_estimator,
    deepspeed_estimators,
    textbook,
)
from benchmarks.against_others.comparison import compared_cases
from benchmarks.against_others.estimator import Prediction, Reason
from benchmarks.against_others.textbook import Transformer
from benchmarks.memory_accuracy.__main__ import costs_of
from benchmarks.memory_accuracy.cases import MODELS

CASES = {case.name: case for case in compared_cases()}

# 4 tokens x 3 samples x width 8 = 96 elements a layer, and 5 x 2 heads x 4 / 8 = 5.
SHAPE = Transformer(layers=2, hidden=8, heads=2, sequence=4)


def eleven_weights() -> nn.Module:
    """3 x 2 + 2, the largest layer, and 2 x 1 + 1."""
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("precision", "stage", "expected"),
    [
        ("fp32", 0, 100 * (4 + 4 + 8)),
        ("fp32", 1, 100 * (4 + 4 + 8 / 4)),
        ("fp32", 2, 100 * (4 + 4 / 4 + 8 / 4)),
        ("fp32", 3, 100 * (4 + 4 + 8) / 4),
        ("autocast", 2, 100 * (4 + 4 / 4 + 8 / 4)),
        ("bf16", 0, 100 * (2 + 2 + 12)),
        ("bf16", 1, 100 * (2 + 2 + 12 / 4)),
        ("bf16", 3, 100 * (2 + 2 + 12) / 4),
    ],
)
def test_textbook_states_are_divided_from_their_stage_on(precision, stage, expected):
    assert textbook.state_bytes(100, precision, stage=stage, ranks=4) == expected


@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [
        ("bf16", {}, 2 * 96 * (34 + 5)),
        ("autocast", {}, 2 * 96 * (34 + 5)),
        ("fp32", {}, 2 * 2 * 96 * (34 + 5)),
        ("bf16", {"flash": True}, 2 * 96 * 34),
        ("bf16", {"recomputed": True}, 2 * 96 * 2),
        ("fp32", {"recomputed": True, "flash": True}, 2 * 2 * 96 * 2),
    ],
)
def test_textbook_activations(precision, options, expected):
    assert textbook.activation_bytes(SHAPE, 3, precision, **options) == expected


def test_the_textbook_is_given_stage_shape_and_precision_of_the_case():
    case = CASES["gpt zero1 none x1 bf16"]
    make, _, _ = MODELS["gpt"]
    params = sum(weight.numel() for weight in make().parameters())
    layer = 128 * 4 * 192 * (34 + 5 * 6 * 128 / 192)
    found = textbook.estimate(case, flash=False)
    assert found == Prediction(allocated=round(params * (2 + 2 + 6) + 4 * layer))
    sharded = textbook.estimate(CASES["mlp fsdp2 none x1 fp32"], flash=False)
    make, _, _ = MODELS["mlp"]
    params = sum(weight.numel() for weight in make().parameters())
    assert sharded.allocated == 8 * params
    assert "activations" in sharded.outside


def test_deepspeed_is_asked_for_no_offload_and_all_ranks_on_one_node():
    # Weights in 16 bit whole, 18 bytes a parameter over 2 ranks.
    assert deepspeed_estimators.zero2_bytes(eleven_weights(), 2) == 2 * 11 + 18 * 11 / 2
    # The largest layer gathered and in 4 bytes, 18 bytes a parameter over 2 ranks.
    assert deepspeed_estimators.zero3_bytes(eleven_weights(), 2) == 4 * 8 + 18 * 11 / 2


def test_deepspeed_counts_tied_weights_once():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    assert deepspeed_estimators.zero2_bytes(module, 2) == 2 * 16 + 18 * 16 / 2


def test_deepspeed_answers_for_the_stages_that_it_has_a_function_for():
    two, three = (CASES[f"mlp zero{stage} none x1 fp32"] for stage in (2, 3))
    make, _, _ = MODELS["mlp"]
    expected = deepspeed_estimators.zero2_bytes(make(), 2)
    assert deepspeed_estimators.estimate(two).allocated == expected
    assert deepspeed_estimators.estimate(two).outside
    expected = deepspeed_estimators.zero3_bytes(make(), 2)
    assert deepspeed_estimators.estimate(three).allocated == expected
    half = CASES["gpt zero2 none x1 bf16"]
    assert not deepspeed_estimators.estimate(half).outside
    for name in ("mlp zero1 none x1 fp32", "mlp ddp none x1 fp32"):
        assert isinstance(deepspeed_estimators.estimate(CASES[name]), Reason)


def test_accelerate_says_four_times_the_weights_and_twice_in_mixed_precision():
    assert accelerate_estimator.training_bytes(eleven_weights, "fp32") == 4 * 11 * 4
    for mixed in ("bf16", "autocast"):
        assert accelerate_estimator.training_bytes(eleven_weights, mixed) == 2 * 11 * 4


def test_accelerate_counts_a_tied_head_once():
    make, _, _ = MODELS["gpt"]
    params = sum(weight.numel() for weight in make().parameters())
    assert accelerate_estimator.training_bytes(make, "fp32") == 4 * 4 * params


def test_accelerate_says_that_it_knows_no_shards():
    assert accelerate_estimator.estimate(CASES["mlp fsdp2 none x1 fp32"]).outside
    assert not accelerate_estimator.estimate(CASES["mlp ddp none x1 fp32"]).outside


def test_bigmodel_is_asked_anew_every_time():
    case = CASES["mlp ddp none x1 fp32"]
    make, _, _ = MODELS["mlp"]
    params = sum(weight.numel() for weight in make().parameters())
    first = bigmodel_estimator.estimate(case)
    kept = costs_of(case.model, "fp32")
    assert bigmodel_estimator.estimate(case) == first
    assert costs_of(case.model, "fp32") is not kept
    # Weights, gradients and two states, and no more than one weight's temporaries.
    assert first.allocated > 16 * params
    shared = replace(case, plan=CASES["mlp fsdp2 none x1 fp32"].plan)
    assert bigmodel_estimator.estimate(shared).allocated < first.allocated
