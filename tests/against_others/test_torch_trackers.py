"""torch's trackers on one weight, whose peak can be counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.against_others.comparison import compared_cases
from benchmarks.against_others.estimator import Reason
from benchmarks.against_others.torch_trackers import (
    estimate,
    replicated_bytes,
    sharded_bytes,
)
from benchmarks.against_others.training_step import Subject
from bigmodel.plans import Mesh, Plan

WEIGHT = 64 * 64 * 4
# Features and target of a sample, and AdamW's count of steps.
ALWAYS = 64 * 4 + 4 + 4
# A loss and the gradient that backward begins with.
BACKWARD = 4 + 4


def subject(**plan) -> Subject:
    return Subject(
        plan=Plan(units=("0",), micro_batch=1, **plan),
        make=lambda: nn.Sequential(nn.Linear(64, 64, bias=False)),
        batch=lambda samples: (torch.zeros(samples, 64), torch.zeros(samples)),
        loss=lambda output, batch: output.sum(),
    )


@pytest.fixture(autouse=True)
def _no_group_is_left():
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


def test_a_replica_on_fake_tensors():
    ddp = subject(backend="ddp", mesh=Mesh(replicate=2))
    # At the end of backward: weight, gradient, two states.
    expected = 4 * WEIGHT + ALWAYS + BACKWARD
    assert replicated_bytes(ddp, fake=True) == expected


def test_a_replica_that_really_trains():
    ddp = subject(backend="ddp", mesh=Mesh(replicate=2))
    # In AdamW's step: the same, a square root and what it is divided to. The gradient
    # lies in DDP's bucket.
    expected = 6 * WEIGHT + ALWAYS
    assert replicated_bytes(ddp, fake=False) == expected


@pytest.mark.parametrize("fake", [True, False])
def test_shards(fake):
    fsdp2 = subject(backend="fsdp2", mesh=Mesh(shard=2))
    sharded_bytes(fsdp2, fake=fake)  # the first is another; see torch_trackers
    # Halves of weight, of two states and of the reduced gradient; the whole gradient
    # and the copy of it that is sent.
    expected = 4 * WEIGHT // 2 + 2 * WEIGHT + ALWAYS + BACKWARD
    assert sharded_bytes(fsdp2, fake=fake) == expected


def test_what_they_answer_for():
    cases = {case.name: case for case in compared_cases()}
    assert isinstance(estimate(cases["mlp zero2 none x1 fp32"], fake=True), Reason)
    ddp = cases["mlp ddp none x1 fp32"]
    assert "DDP" in estimate(ddp, fake=True).outside
    assert not estimate(ddp, fake=False).outside
    assert not estimate(cases["mlp fsdp2 none x1 fp32"], fake=True).outside
