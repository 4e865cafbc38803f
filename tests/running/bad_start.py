"""A rank of a launch that must fail with a clear message; says so and exits.

bad_start.py MODE        with RANK, WORLD_SIZE and MASTER_PORT set
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bigmodel.plans import Mesh, Plan
from bigmodel.running.script import run_main
from bigmodel.running.session import prepare


def main() -> None:
    mode, rank = sys.argv[1], int(os.environ["RANK"])
    torch.set_num_threads(1)
    plan = Plan(
        backend="ddp",
        mesh=Mesh(replicate=8 if mode == "world" else 2),
        micro_batch=1 + (rank if mode == "plans" else 0),
    )
    late = rank == int(mode[-1]) if mode.startswith("absent") else False
    if late:
        time.sleep(30)
    model = torch.nn.Linear(4, 2)
    timeout = 4.0 if mode.startswith(("absent", "sleep")) else 30.0
    engine = prepare(
        plan,
        model,
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda output, batch: (output - batch[1]).square().mean(),
        timeout=timeout,
    )
    for step in range(3):
        if step == 2 and rank == 1 and mode == "sleep":
            time.sleep(15)
        if step == 2 and rank == 1 and mode == "die":
            os._exit(7)
        if step == 2 and rank == 1 and mode == "raise":
            engine.step((torch.zeros(3, 4), torch.zeros(3, 2)))
        engine.step((torch.zeros(1, 4), torch.zeros(1, 2)))
    engine.close()


if __name__ == "__main__":
    run_main(main)
