"""Gradients of 16-bit weights add up over micro-batches in fp32, on two real ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.plans import DdpOptions, Mesh, Plan, Stages
from bigmodel.running.session import prepare
from tests.cases.subjects import (
    PAIR,
    SGD,
    Scale,
    close,
    first_rank,
    gradient,
    mean_output,
    whole,
)

COUNT = 512
"""Ones to add: a power of two, so that shares are exact; in bfloat16 they make 256."""


def mp_03_replicas_add_up_and_average_in_fp32() -> None:
    plan = PAIR(precision="bf16", accumulation=COUNT)
    x = torch.full((COUNT, 1), float(COUNT))
    for options in (
        DdpOptions(),
        DdpOptions(gradient_views=False),
        DdpOptions(find_unused=True),
        DdpOptions(hook="fp16"),
        DdpOptions(hook="powersgd", powersgd_start=2),
    ):
        with prepare(replace(plan, ddp=options), Scale(), SGD, mean_output) as engine:
            close(gradient(engine, x), COUNT)
            # Nothing of the first step is in the second.
            close(gradient(engine, x), COUNT)
    with prepare(replace(plan, zero_stage=1), Scale(), SGD, mean_output) as engine:
        close(gradient(engine, x), COUNT)
    scaled = replace(plan, precision="fp16", accumulation=4)
    with prepare(scaled, Scale(), SGD, mean_output) as engine:
        close(gradient(engine, torch.ones(4, 1)), 1.0)


def mp_03_stages_add_up_in_fp32() -> None:
    # The second stage multiplies by one: gradients of both are the inputs.
    units = tuple(str(index) for index in range(4))
    for schedule, cuts in (
        ("gpipe", (2,)),
        ("1f1b", (2,)),
        ("interleaved-zb", (1, 2, 3)),
        ("zbv", (1, 2, 3)),
    ):
        plan = Plan(
            backend="pipeline",
            mesh=Mesh(pipeline=2),
            units=units,
            stages=Stages(schedule=schedule, cuts=cuts),
            precision="bf16",
            accumulation=COUNT,
        )
        model = nn.Sequential(*(Scale() for _ in units))
        batch = (torch.full((COUNT, 1), float(COUNT)), torch.zeros(COUNT))
        with prepare(plan, model, SGD, mean_output) as engine:
            before = {name: whole(engine, f"{name}.w") for name in units}
            engine.step(batch)
            for name in units:
                close(before[name] - whole(engine, f"{name}.w"), COUNT)


class Sometimes(nn.Module):
    """Of three weights one is never used, and one by some inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(1))
        self.sometimes = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        output = self.always * x
        return output * self.sometimes if float(x) > 1 else output


def mp_03_a_weight_of_an_early_micro_batch_counts_and_an_unused_one_stays() -> None:
    plan = PAIR(precision="bf16", accumulation=2, ddp=DdpOptions(find_unused=True))
    decay = partial(torch.optim.SGD, lr=1.0, weight_decay=0.5)
    # Only rank 0, and only in its first micro-batch, uses `sometimes`.
    x = torch.tensor([[2.0 if first_rank() else 1.0], [1.0]])
    with prepare(plan, Sometimes(), decay, mean_output) as engine:
        engine.step(x)
        close(whole(engine, "always"), 1 - 0.5 - (2 + 1 + 1 + 1) / 4)
        close(whole(engine, "sometimes"), 1 - 0.5 - 2 / 4)
        close(whole(engine, "never"), 1.0)


class Pictures(nn.Module):
    """Convolutions whose weights lie in memory with channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten()
        ).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def mp_03_sums_keep_the_layout_of_weights() -> None:
    torch.manual_seed(1)
    x = torch.randn(8, 3, 6, 6)
    states = []
    for plan, rows in (
        (PAIR(precision="bf16", accumulation=4), x[dist.get_rank() * 4 :][:4]),
        (PAIR(precision="bf16", accumulation=8), None),
    ):
        # The second: both ranks run all rows, and the average is the sum again.
        with prepare(plan, Pictures(), SGD, mean_output) as engine:
            engine.step(x if rows is None else rows)
            states.append(engine.state_dict())
    one, two = states
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)
