"""What of a batch reaches the model, and where the loss is found."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bigmodel.backends.batch import num_samples, split
from bigmodel.backends.forward import compute_loss, model_inputs
from bigmodel.errors import UsageError

A, B = torch.zeros(4, 2), torch.ones(4)


def loss(output, batch):
    return output.mean()


class Named(nn.Module):
    def forward(self, x, labels=None):
        return x


class Anything(nn.Module):
    def forward(self, x, **rest):
        return x


@pytest.mark.parametrize(
    ("model", "batch", "function", "positional", "named"),
    [
        (Named(), A, None, 1, set()),
        (Named(), (A, B), None, 2, set()),
        (Named(), (A, B), loss, 1, set()),
        (Named(), [A, A, B], loss, 2, set()),
        (Named(), (A,), loss, 1, set()),
        (Named(), {"x": A, "labels": B}, loss, 0, {"x", "labels"}),
        (Named(), {"x": A, "targets": B}, loss, 0, {"x"}),
        (Named(), {"x": A, "targets": B}, None, 0, {"x", "targets"}),
        (Anything(), {"x": A, "labels": B}, loss, 0, {"x"}),
        (Named(), UserDict(x=A), None, 0, {"x"}),
    ],
)
def test_model_inputs(model, batch, function, positional, named):
    got_positional, got_named = model_inputs(model, batch, function)
    assert len(got_positional) == positional
    assert set(got_named) == named


@pytest.mark.parametrize(
    "output",
    [
        torch.tensor(3.0),
        SimpleNamespace(loss=torch.tensor(3.0)),
        {"loss": torch.tensor(3.0), "logits": A},
        (A, torch.tensor(3.0)),
    ],
)
def test_loss_in_the_output(output):
    assert compute_loss(Named(), output, A, None) == 3


def test_no_loss():
    with pytest.raises(UsageError, match=r"Named returned a tensor of shape \(4, 2\)"):
        compute_loss(Named(), A, A, None)
    with pytest.raises(UsageError, match=r"end it with \.mean"):
        compute_loss(Named(), A, A, lambda output, batch: output)


def test_split():
    parts = split({"x": A, "y": (B, "all")}, 2)
    assert [part["x"].shape[0] for part in parts] == [2, 2]
    assert parts[1]["y"][1] == "all"
    with pytest.raises(UsageError, match="4 samples does not divide into 3"):
        split(A, 3)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": 1}, "holds no tensor"),
        ({"x": torch.tensor(1.0)}, r"batch\['x'\] is a tensor without dimensions"),
        ((A, torch.zeros(3)), r"batch\[0\] has 4 samples and batch\[1\] has 3"),
    ],
)
def test_num_samples(batch, message):
    with pytest.raises(UsageError, match=message):
        num_samples(batch)
