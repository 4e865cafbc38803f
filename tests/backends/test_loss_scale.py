"""The loss scale in one process; parity shows it on several ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bigmodel.backends.loss_scale import LossScale
from bigmodel.errors import UsageError


def weight(gradient: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(gradient)))
    parameter.grad = torch.tensor(gradient)
    return parameter


def test_an_empty_shard_has_nothing_to_look_at():
    scale = LossScale(enabled=True)
    params = {"empty": weight([]), "full": weight([scale.factor])}
    assert scale.unscale(params)
    assert params["full"].grad.tolist() == [1.0]


def test_mp_01_skips_down_to_a_factor_of_1_and_then_names_the_parameter():
    scale = LossScale(enabled=True)
    for _ in range(16):
        assert not scale.unscale({"fine": weight([1.0]), "bad": weight([math.inf])})
    assert scale.factor == 1.0
    with pytest.raises(UsageError, match="'bad' on rank 0"):
        scale.unscale({"fine": weight([1.0]), "bad": weight([math.nan])})
