"""Ranks of launches that must fail with a clear message; each says so and exits.

bad_start.py FOLDER MODE...     two ranks for each mode, all at once
bad_start.py MODE               one rank, with RANK and the like set

With a folder, the ranks are forks of this process, which imports everything once; it
writes FOLDER/MODE-RANK.err and FOLDER/ends.json: exit codes and times.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bigmodel.plans import Mesh, Plan
from bigmodel.running.script import run_main
from bigmodel.running.session import prepare


class FailingBackward(torch.autograd.Function):
    """Passes its input on; fails in the backward of rank 1's second step."""

    calls = 0

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        FailingBackward.calls += 1
        if FailingBackward.calls == 2 and os.environ["RANK"] == "1":
            print(f"failed at {time.monotonic()}", file=sys.stderr, flush=True)
            raise MemoryError("no memory")
        return gradient


def train(mode: str) -> None:
    rank = int(os.environ["RANK"])
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
    timeout = {"absent0": 4.0, "absent1": 4.0, "sleep": 25.0}.get(mode, 60.0)
    fails = mode in ("memory", "teardown")

    def loss(output, batch):
        error = (output - batch[1]).square().mean()
        return FailingBackward.apply(error) if fails else error

    engine = prepare(
        plan,
        model,
        lambda params: torch.optim.SGD(params, lr=0.1),
        loss,
        timeout=timeout,
    )
    for step in range(3):
        if step == 2 and rank == 1 and mode == "sleep":
            time.sleep(45)
        if step == 2 and rank == 1 and mode == "die":
            os._exit(7)
        if step == 2 and rank == 1 and mode == "raise":
            engine.step((torch.zeros(3, 4), torch.zeros(3, 2)))
        engine.step((torch.zeros(1, 4), torch.zeros(1, 2)))
    engine.close()


def be_rank(mode: str, rank: int, port: int, folder: Path) -> None:
    """Train in a fork, and end the process."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        BIGMODEL_REPORTS=str(folder / mode),
    )
    error = os.open(folder / f"{mode}-{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(error, 2)
    code: object = 0
    try:
        run_main(lambda: train(mode))
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if mode == "teardown" and rank == 1:
        time.sleep(600)
    sys.stderr.flush()
    os._exit(int(str(code)))


def start_all(folder: Path, modes: list[str]) -> None:
    """Start all at once: most of their time is waiting."""
    ranks = {}
    for mode in modes:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(2):
            if (child := os.fork()) == 0:
                be_rank(mode, rank, port, folder)
            ranks[child] = f"{mode}-{rank}"
    ends = {}
    for _ in ranks:
        child, status = os.wait()
        ends[ranks[child]] = os.waitstatus_to_exitcode(status), time.monotonic()
    (folder / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        start_all(Path(sys.argv[1]), sys.argv[2:])
    else:
        run_main(lambda: train(sys.argv[1]))
