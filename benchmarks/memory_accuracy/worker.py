"""One rank: really trains every case and writes what the allocator saw."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.memory_accuracy import cases as matrix
from benchmarks.memory_accuracy.optimizers import OPTIMIZERS
from bigmodel.running.measuring import measure_memory
from bigmodel.running.session import Engine, prepare


def make(case: matrix.Case) -> Engine:
    model, _, loss = matrix.MODELS[case.model]
    optimizer = partial(OPTIMIZERS[case.plan.optimizer], lr=1e-3)
    return prepare(case.plan, model, optimizer, loss)


def main() -> None:
    out, size, *only = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group()
    measured = {}
    for case in matrix.cases(quick=size == "quick", only=only):
        _, batch, _ = matrix.MODELS[case.model]
        samples = case.plan.local_batch
        # PowerSGD makes what it keeps when it sets in.
        late = case.plan.ddp.hook == "powersgd"
        memory = measure_memory(
            partial(make, case),
            lambda engine, make=batch, n=samples: make(n),
            steps=6 + 2 * late * case.plan.ddp.powersgd_start,
        )
        measured[case.name] = asdict(memory)
        # After every case: a case that fails takes none with it.
        (Path(out) / f"rank{dist.get_rank()}.json").write_text(json.dumps(measured))
        if dist.get_rank() == 0:
            print(f"measured {case.name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
