"""One rank of a launch that runs all cases of its world size.

    torchrun --nproc-per-node WORLD worker.py FOLDER {all,quick,launched} [NAME...]

A name is that of a case, or the beginning of one. `launched`: under any launcher; the
process group is made by `prepare`, and names are whole.

Rank 0 writes FOLDER/NAME.pt, or FOLDER/NAME.error with the traceback.
"""

from __future__ import annotations

import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from benchmarks.layouts import not_here
from benchmarks.parity.cases import STEPS, Case, cases
from benchmarks.parity.models import SUBJECTS, make_model, make_optimizer
from benchmarks.parity.reference import optimizer_over, sample_batch
from bigmodel.running.environment import read_process
from bigmodel.running.session import Engine, prepare


def make_engine(case: Case) -> Engine:
    model = make_model(case.model, freeze=case.freeze)
    if read_process().rank:
        # Rank 0's weights must reach the others.
        for parameter in model.parameters():
            parameter.data.zero_()
    return prepare(
        case.plan,
        model,
        optimizer_over(model) if case.groups else make_optimizer,
        SUBJECTS[case.model].loss,
        clip_norm=case.clip_norm,
    )


def train(engine: Engine, case: Case, steps: range) -> tuple[list[float], list[float]]:
    take = sample_batch(case)
    size = case.plan.local_batch
    begin = case.plan.mesh.data_rank(engine.rank) * size
    losses, norms = [], []
    for step in steps:
        result = engine.step(take(step, begin, begin + size))
        losses.append(float(result.loss))
        if result.grad_norm is not None:
            norms.append(float(result.grad_norm))
    return losses, norms


def run(case: Case, folder: Path) -> dict:
    engine = make_engine(case)
    losses, norms = train(engine, case, range(STEPS))
    size = case.plan.local_batch
    begin = case.plan.mesh.data_rank(engine.rank) * size
    evaluation = float(engine.evaluate(sample_batch(case)(0, begin, begin + size)))
    result = {
        "losses": losses,
        "norms": norms,
        "evaluation": evaluation,
        "weights": engine.state_dict(),
    }
    if case.resume:
        path = folder / f"{case.name}-checkpoint"
        engine.save(path)
        train(engine, case, range(2))
        fresh = make_engine(case)
        train(fresh, case, range(1, 2))  # states that loading must replace
        fresh.load(path)
        train(fresh, case, range(2))
        result["went_on"] = engine.state_dict()
        result["resumed"] = fresh.state_dict()
        result["steps"] = fresh.steps
    return result


def main() -> None:
    # deepspeed gives each rank --local_rank=N as its first argument.
    argv = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
    folder, part, names = Path(argv[0]), argv[1], argv[2:]
    process = read_process()
    torch.set_num_threads(1)
    launched = part == "launched"
    if not launched:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in cases(process.world_size, quick=part == "quick"):
        if names and not case.name.startswith(tuple(names)):
            continue
        if not_here(case.plan) or (launched and case.name not in names):
            continue
        begin = time.perf_counter()
        try:
            result = run(case, folder)
        except Exception:
            text = traceback.format_exc()
            (folder / f"{case.name}.error").write_text(text)
            print(f"rank {process.rank} {case.name}\n{text}", flush=True)
            continue
        if process.rank == 0:
            result["launcher"] = process.launcher
            torch.save(result, folder / f"{case.name}.pt")
            seconds = time.perf_counter() - begin
            print(f"{case.name}: {seconds:.1f} s", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
