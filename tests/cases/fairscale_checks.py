"""fairscale's optimizers on two ranks."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigmodel.plans import FairscaleOptions, Mesh, Plan
from bigmodel.running.session import prepare
from tests.cases.subjects import mine

SGD = partial(torch.optim.SGD, lr=0.02)
PLAN = Plan(
    backend="fairscale",
    mesh=Mesh(shard=2),
    zero_stage=1,
    micro_batch=2,
    accumulation=2,
    fairscale=FairscaleOptions(adascale=True),
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's four samples; noise keeps gradients from agreeing."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 3, generator=generator)
    noise = torch.randn(8, 1, generator=generator)
    return mine(inputs), mine(inputs.sum(1, keepdim=True) + noise)


def squared(output, batch):
    return nn.functional.mse_loss(output, batch[-1])


def by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train as fairscale's documentation does it; return gains and weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fairscale.optim import AdaScale
    plain = model()
    optimizer = AdaScale(SGD(plain.parameters()), num_gradients_to_accumulate=2)
    wrapped = DistributedDataParallel(plain)
    gains = []
    for step in range(4):
        inputs, targets = batch(step)
        for part in range(2):
            rows = slice(2 * part, 2 * part + 2)
            wrapped.require_backward_grad_sync = part == 1
            output = wrapped(inputs[rows])
            (nn.functional.mse_loss(output, targets[rows]) / 2).backward()
        gains.append(optimizer.gain())
        optimizer.step()
        optimizer.zero_grad()
    weights = {k: v.detach().clone() for k, v in plain.state_dict().items()}
    optimizer.unhook()
    return gains, weights


def adascale_2_ranks_gain_as_much_as_by_hand():
    gains, weights = by_hand()
    assert len(set(gains)) == 4
    assert all(1 < gain < 4 for gain in gains), gains
    folder = Path(os.environ["CASES_FOLDER"]) / "adascale"
    with prepare(PLAN, model(), SGD, squared) as engine:
        for step in range(2):
            engine.step(batch(step))
        engine.save(folder)
    # The averages behind the gain are part of the checkpoint.
    with prepare(PLAN, model(), SGD, squared) as engine:
        engine.step(batch(7))
        engine.load(folder)
        for step in (2, 3):
            engine.step(batch(step))
        state = engine.state_dict()
    if not dist.get_rank():
        for name, value in weights.items():
            assert state[name].numpy() == pytest.approx(value.numpy(), abs=1e-6), name
