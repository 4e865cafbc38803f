"""One rank: both ways in turns, for seconds and for memory.

torchrun --nproc-per-node WORLD -m benchmarks.overhead.worker FOLDER ROUNDS NAME...
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.overhead.loops import make_loop
from benchmarks.overhead.subjects import (
    CLIP_NORM,
    loss_of,
    make_batch,
    make_model,
    make_optimizer,
    plans,
)
from bigmodel.plans import Plan
from bigmodel.running.measuring import measure_memory
from bigmodel.running.session import Engine, prepare

WARM_UP = 3


def make_engine(plan: Plan) -> Engine:
    return prepare(plan, make_model, make_optimizer, loss_of, clip_norm=CLIP_NORM)


def local_batch(plan: Plan):
    return make_batch(plan.local_batch)


def seconds(plan: Plan, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of single steps, of the engine's and of the loop's."""
    batch = local_batch(plan)
    found: tuple[list[float], list[float]] = ([], [])
    # Who is made first gets other memory: each is, for half of the rounds.
    for first in (0, 1):
        makers = (make_engine, make_loop)
        ways = {which: makers[which](plan) for which in (first, 1 - first)}
        for index in range(WARM_UP + rounds // 2):
            # Who goes first changes, so that neither always finds warm caches.
            order = (0, 1) if index % 2 else (1, 0)
            for which in order:
                dist.barrier()
                start = time.perf_counter()
                ways[which].step(batch)
                elapsed = time.perf_counter() - start
                if index >= WARM_UP:
                    found[which].append(elapsed)
        for way in ways.values():
            way.close()
    return found


def memory(plan: Plan) -> tuple[int, int]:
    """Return the peaks of a steady step, of the engine's and of the loop's."""
    batch = local_batch(plan)
    return tuple(
        measure_memory(make, lambda _: batch).peak
        for make in (partial(make_engine, plan), partial(make_loop, plan))
    )


def main() -> None:
    folder, rounds, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for name, plan in plans():
        if name not in names:
            continue
        ours, theirs = seconds(plan, rounds)
        results[name] = {
            "seconds": [ours, theirs],
            "bytes": memory(plan),
        }
        if dist.get_rank() == 0:
            print(f"measured {name}", flush=True)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
