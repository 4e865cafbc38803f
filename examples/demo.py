"""Plan for this machine, train by the plan, and compare with the prediction.

    python examples/demo.py [--out demo-out] [--seconds 60]

A small GPT of transformers learns bytes from the sources of Python's standard library,
in two processes. Nothing is downloaded and no GPU is needed. Written to the folder: the
plan, the metrics of every step, a checkpoint, and a report as one HTML page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import torch
from measure_step import SEQUENCE, make_model, sizes
from rich.console import Console

import bigmodel
from bigmodel.reports.page import Comparison, save_page
from bigmodel.reports.tables import decision_report
from bigmodel.running.launcher import run_script
from bigmodel.running.text import standard_library_bytes
from bigmodel.units import format_bytes, format_seconds

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes" / "pretrain_gpt.py"
MEASURE = HERE / "measure_step.py"

PROCESSES = 2
GLOBAL_BATCH = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    # Plans print as `ddp [replicate 2]`, which is no markup.
    console = Console(markup=False, soft_wrap=True, highlight=False)

    console.rule("1. plan")
    decision = decide()
    console.print(decision_report(decision))
    plan_file = decision.save(out / "plan.json")

    console.rule("2. train")
    steps = max(40, math.ceil(args.seconds / decision.best.seconds))
    metrics = out / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    console.print(f"{steps} steps of {decision.plan.describe()}")
    code = run_script(
        RECIPE,
        [
            *sizes(),
            "--steps", str(steps),
            "--learning-rate", "1e-3",
            "--metrics", str(metrics),
            "--out", str(out / "checkpoint"),
        ],
        decision.plan,
        log_folder=out / "logs",
    )  # fmt: skip
    if code:
        return code
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    loss = statistics.mean(line["loss"] for line in lines[-10:])
    unigram = unigram_entropy()
    console.print(
        f"loss {lines[0]['loss']:.3f} -> {loss:.3f} nats per byte; "
        f"guessing by byte frequency alone: {unigram:.3f}"
    )

    console.rule("3. predicted against measured")
    compared = compare(decision, lines, out)
    for row in compared:
        show = format_bytes if row.is_bytes else format_seconds
        console.print(
            f"{row.name:40} predicted {show(row.predicted):>11}   measured "
            f"{show(row.measured):>11}   {row.error:+.1%}"
        )
    report = save_page(decision, out / "report.html", compared)
    console.print(
        f"\nplan {plan_file}, checkpoint {out / 'checkpoint'}, report {report}"
    )
    if loss > 0.8 * unigram:
        console.print("the model has not learned: its loss is near that of unigrams")
        return 1
    return 0


def decide() -> bigmodel.Decision:
    """Plan for two devices, each half of this machine's cores."""
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
    return bigmodel.plan(
        make_model,
        {"input_ids": tokens, "labels": tokens},
        cluster=f"{PROCESSES}xcpu",
        global_batch=GLOBAL_BATCH,
        precision="fp32",
    )


def compare(
    decision: bigmodel.Decision, lines: list[dict], out: Path
) -> list[Comparison]:
    """Measure the memory in a short run of its own, and read the steps' seconds."""
    best = decision.best
    found = out / "measured"
    run_script(
        MEASURE, ["--out", str(found.resolve())], decision.plan, log_folder=out / "logs"
    )
    rows = []
    for rank in range(decision.plan.world):
        measured = json.loads((found / f"rank{rank}.json").read_text())
        rows.append(
            Comparison(
                name=f"peak allocated memory of a step, rank {rank}",
                predicted=best.of_rank(rank).allocated,
                measured=measured["peak"],
            )
        )
    ends = [line["seconds"] for line in lines]
    steps = [later - earlier for earlier, later in pairwise(ends)]
    rows.append(
        Comparison(
            name="seconds of a step, median",
            predicted=best.seconds,
            measured=statistics.median(steps),
            is_bytes=False,
        )
    )
    return rows


def unigram_entropy() -> float:
    """Return the entropy of the text's bytes in nats, each byte by itself."""
    counts = torch.bincount(standard_library_bytes(4_000_000).long(), minlength=256)
    shares = counts[counts > 0].double() / counts.sum()
    return float(-(shares * shares.log()).sum())


if __name__ == "__main__":
    sys.exit(main())
