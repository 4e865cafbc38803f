"""Predicted against measured peak of allocated bytes, on the CPU, at 2 processes.

    python -m benchmarks.memory_accuracy [--quick] [--only bf16 ddp] [--out FOLDER]
        [--recordings FOLDER]

Prints a row for every case, of the fullest rank of its worst predicted pipeline stage,
and a summary by backend.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from pathlib import Path

import bigmodel
from benchmarks.memory_accuracy import cases as matrix
from benchmarks.versions import versions
from bigmodel.clusters import Cluster, Device, Link, Node
from bigmodel.plans import Precision
from bigmodel.search import predict
from bigmodel.simulator import Costs
from bigmodel.units import GIB, MIB

_SECONDS = 7200
"""The whole matrix takes 40 minutes on two cores."""

# Only bytes are compared, so any CPU device serves.
CLUSTER = Cluster(
    name="2xcpu",
    node=Node(
        device=Device(
            name="cpu",
            kind="cpu",
            memory=64 * GIB,
            bandwidth=1e10,
            peaks={"float32": 1e11, "bfloat16": 1e11},
            source="a stand-in",
        ),
        count=matrix.PROCESSES,
        link=Link(bandwidth=1e9, latency=1e-4),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case on the stage that is predicted worst."""

    case: str
    backend: str
    stage: int
    measured: int
    """Of the fullest rank of the stage, which is what is predicted."""
    emptiest: int
    """Of the emptiest one."""
    predicted: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def measure(
    *, quick: bool, only: Sequence[str] = (), recordings: Path | None = None
) -> list[dict]:
    """Train all cases and return what each rank recorded, by case.

    Args:
        quick: Only a fifth of the cases.
        only: Only those with one of these words.
        recordings: A folder to leave it in, or to take it from if it is there.
    """
    if recordings is not None:
        recordings.mkdir(parents=True, exist_ok=True)
        if not list(recordings.glob("rank*.json")):
            _train(recordings, quick=quick, only=only)
        return _read(recordings)
    with tempfile.TemporaryDirectory() as folder:
        _train(Path(folder), quick=quick, only=only)
        return _read(Path(folder))


def _train(folder: Path, *, quick: bool, only: Sequence[str]) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run",
        f"--nproc-per-node={matrix.PROCESSES}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", "--local-addr=localhost",
        "-m", "benchmarks.memory_accuracy.worker", str(folder),
        "quick" if quick else "all", *only,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=_SECONDS)


def _read(folder: Path) -> list[dict]:
    return [
        json.loads((folder / f"rank{rank}.json").read_text())
        for rank in range(matrix.PROCESSES)
    ]


@cache
def costs_of(model: str, precision: Precision) -> Costs:
    make, batch, loss = matrix.MODELS[model]
    spec = bigmodel.trace(make, batch(2), precision=precision, target="cpu", loss=loss)
    return Costs(spec, CLUSTER)


def compare(ranks: list[dict], *, quick: bool, only: Sequence[str] = ()) -> list[Row]:
    rows = []
    for case in matrix.cases(quick=quick, only=only):
        estimate = predict(case.plan, costs_of(case.model, case.plan.precision))
        stages = [
            [ranks[rank][case.name] for rank in entry.ranks] for entry in estimate.ranks
        ]
        candidates = [
            Row(
                case=case.name,
                backend=case.plan.backend,
                stage=stage,
                measured=max(memory["peak"] for memory in found),
                emptiest=min(memory["peak"] for memory in found),
                predicted=estimate.ranks[stage].allocated,
            )
            for stage, found in enumerate(stages)
        ]
        rows.append(max(candidates, key=lambda row: abs(row.error)))
    return rows


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.backend, []).append(row)
    groups["all"] = rows
    return {
        name: {
            "cases": len(group),
            "median": statistics.median(abs(row.error) for row in group),
            "maximum": max(abs(row.error) for row in group),
            "deepest_under_estimate": min(0.0, *(row.error for row in group)),
        }
        for name, group in groups.items()
    }


def show(rows: list[Row]) -> None:
    print(f"{'case':40} {'stage':>5} {'measured':>12} {'predicted':>12} {'error':>8}")
    for row in rows:
        note = ""
        if row.emptiest < 0.99 * row.measured:
            note = f"  emptiest rank {row.emptiest / MIB:.3f} MiB"
        print(
            f"{row.case:40} {row.stage:>5} {row.measured / MIB:>8.3f} MiB "
            f"{row.predicted / MIB:>8.3f} MiB {row.error:>+8.2%}{note}"
        )
    print()
    for name, figures in summary(rows).items():
        print(
            f"{name:10} {figures['cases']:>3} cases: median |error| "
            f"{figures['median']:.2%}, largest {figures['maximum']:.2%}, deepest "
            f"under-estimate {figures['deepest_under_estimate']:.2%}"
        )


def save(rows: list[Row], folder: Path) -> None:
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    document = {
        "what": "peak of allocated bytes of a steady step, predicted and measured",
        "date": str(date.today()),
        "machine": machine,
        "versions": versions(("torch", "deepspeed", "transformers")),
        "summary": summary(rows),
        "rows": [{**asdict(row), "error": row.error} for row in rows],
    }
    path = folder / f"memory_accuracy_cpu_{matrix.PROCESSES}_processes.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwritten to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the cases")
    parser.add_argument("--only", nargs="*", default=[], help="words of their names")
    parser.add_argument("--recordings", type=Path, help="keep them, or take these")
    parser.add_argument("--out", type=Path, help="write the table into this folder")
    args = parser.parse_args()
    ranks = measure(quick=args.quick, only=args.only, recordings=args.recordings)
    rows = compare(ranks, quick=args.quick, only=args.only)
    show(rows)
    if args.out:
        save(rows, args.out)


if __name__ == "__main__":
    main()
