"""The whole matrix as a table.

    python -m benchmarks.parity [--quick] [--world 2] [--only NAME] --out FOLDER

Writes FOLDER/parity.json and FOLDER/parity.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.layouts import not_here
from benchmarks.parity.cases import WORLDS, cases
from benchmarks.parity.comparison import Deviation, deviation, run_matrix

SECONDS = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="what the tests take")
    parser.add_argument("--world", type=int, choices=WORLDS, help="only this one")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for world in [options.world] if options.world else WORLDS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            output = run_matrix(
                world, folder, *options.only, quick=options.quick, seconds=SECONDS
            )
            for case in cases(world, quick=options.quick):
                if options.only and not case.name.startswith(tuple(options.only)):
                    continue
                reason = not_here(case.plan)
                found = Deviation() if reason else deviation(case, folder, output)
                faults = [] if reason else found.faults(case)
                rows.append(
                    {
                        "processes": world,
                        "case": case.name,
                        "plan": case.plan.describe(),
                        **asdict(found),
                        "faults": faults,
                        "not_run": reason,
                    }
                )
                if reason:
                    print(f"{world} {case.name:36} not run: {reason}", flush=True)
                    continue
                print(
                    f"{world} {case.name:36} losses {found.losses:.1e} weights "
                    f"{found.weights:.1e} {'; '.join(faults)[-300:] or 'ok'}",
                    flush=True,
                )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "parity.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / "parity.md").write_text(_table(rows))
    bad = sum(bool(row["faults"]) for row in rows)
    absent = sum(bool(row["not_run"]) for row in rows)
    print(f"{len(rows)} cases, {bad} beyond their bounds, {absent} not run")
    raise SystemExit(bad > 0)


def _table(rows: list[dict]) -> str:
    head = ("processes", "case", "losses", "evaluation", "norms", "weights", "resumed")
    lines = ["| " + " | ".join((*head, "verdict")) + " |", "|---" * 8 + "|"]
    for row in rows:
        numbers = [f"{row[key]:.1e}" for key in head[2:]]
        if row["not_run"]:
            numbers = [""] * len(numbers)
        verdict = "; ".join(row["faults"]).splitlines()[-1:]
        absent = row["not_run"] and f"not run: {row['not_run']}"
        verdict = verdict or [absent or "within bounds"]
        cells = [str(row["processes"]), row["case"], *numbers, *verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
