"""What `Engine.step` costs beyond a hand-written loop of the same library.

    python -m benchmarks.overhead [--rounds 40] [--only NAME...] [--out FOLDER]

Steps alternate within one run. A row gives the ratio of the medians over all rounds,
the quartiles of the ratios of single pairs, and the ratio of the peaks of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from benchmarks.layouts import not_here
from benchmarks.overhead.subjects import WORLD, plans

SLOWEST, LARGEST = 1.02, 1.01
"""Bounds of the ratios."""


@dataclass(frozen=True)
class Row:
    """One backend."""

    name: str
    processes: int
    rounds: int
    milliseconds: float
    """Median of the engine's step, slowest rank."""
    ratio: float
    quartiles: tuple[float, float]
    bytes: int
    memory_ratio: float

    @property
    def within(self) -> bool:
        """Say whether both ratios are within their bounds."""
        return self.ratio <= SLOWEST and self.memory_ratio <= LARGEST


def measure(world: int, rounds: int, names: list[str]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={world}", "-m", "benchmarks.overhead.worker",
            folder, str(rounds), *names,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, timeout=1500)
        return [
            json.loads((Path(folder) / f"rank{rank}.json").read_text())
            for rank in range(world)
        ]


def compare(ranks: list[dict], rounds: int) -> list[Row]:
    rows = []
    for name in ranks[0]:
        # A step ends when its slowest rank does.
        ours, theirs = (
            [
                max(pair)
                for pair in zip(*(r[name]["seconds"][way] for r in ranks), strict=True)
            ]
            for way in (0, 1)
        )
        pairs = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        first, _, third = statistics.quantiles(pairs, n=4)
        peaks = [max(r[name]["bytes"][way] for r in ranks) for way in (0, 1)]
        rows.append(
            Row(
                name=name,
                processes=len(ranks),
                rounds=rounds,
                milliseconds=1000 * statistics.median(ours),
                ratio=statistics.median(ours) / statistics.median(theirs),
                quartiles=(first, third),
                bytes=peaks[0],
                memory_ratio=peaks[0] / peaks[1],
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, help="write the table into this folder")
    options = parser.parse_args()
    chosen = {
        name: plan for name, plan in plans() if not options.only or name in options.only
    }
    absent = {name: not_here(plan) for name, plan in chosen.items() if not_here(plan)}
    rows: list[Row] = []
    # Steps of one process are short of noise, and cheap: more of them.
    for world, rounds in ((WORLD, options.rounds), (1, 3 * options.rounds)):
        names = [
            name
            for name, plan in chosen.items()
            if plan.world == world and name not in absent
        ]
        if names:
            rows += compare(measure(world, rounds, names), rounds)
    for row in rows:
        low, high = row.quartiles
        print(
            f"{row.name:12} {row.processes} {row.milliseconds:8.1f} ms   "
            f"time x {row.ratio:.3f} (quartiles {low:.3f} to {high:.3f})   "
            f"memory x {row.memory_ratio:.4f}"
            f"{'' if row.within else '   beyond the bounds'}"
        )
    for name, reason in absent.items():
        print(f"{name:12} {chosen[name].world} not run: {reason}")
    if options.out:
        document = {
            "what": "Engine.step over a hand-written loop: ratios of medians and peaks",
            "date": str(date.today()),
            "rows": [asdict(row) for row in rows],
            "not_run": absent,
        }
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "overhead_cpu.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(not all(row.within for row in rows))


if __name__ == "__main__":
    main()
