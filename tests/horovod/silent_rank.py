"""Two ranks of a plan for Horovod, of which the second falls asleep before step 2."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from bigmodel.plans import Mesh, Plan
from bigmodel.running.script import run_main
from bigmodel.running.session import prepare

PLAN = Plan(backend="horovod", mesh=Mesh(replicate=2), micro_batch=2)


def main() -> None:
    with prepare(
        PLAN,
        lambda: nn.Linear(4, 4),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda output, batch: output.square().mean(),
        timeout=5,
    ) as engine:
        engine.step(torch.ones(2, 4))
        if engine.rank == 1:
            time.sleep(15)
        engine.step(torch.ones(2, 4))


run_main(main)
