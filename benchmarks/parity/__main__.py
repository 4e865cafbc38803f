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

from benchmarks.parity.cases import WORLDS, cases
from benchmarks.parity.comparison import deviation, run_matrix

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
                found = deviation(case, folder, output)
                faults = found.faults(case)
                rows.append(
                    {
                        "processes": world,
                        "case": case.name,
                        "plan": case.plan.describe(),
                        **asdict(found),
                        "faults": faults,
                    }
                )
                print(
                    f"{world} {case.name:36} losses {found.losses:.1e} weights "
                    f"{found.weights:.1e} {'; '.join(faults)[-300:] or 'ok'}",
                    flush=True,
                )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "parity.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / "parity.md").write_text(_table(rows))
    bad = sum(bool(row["faults"]) for row in rows)
    print(f"{len(rows)} cases, {bad} beyond their bounds")
    raise SystemExit(bad > 0)


def _table(rows: list[dict]) -> str:
    head = ("processes", "case", "losses", "evaluation", "norms", "weights", "resumed")
    lines = ["| " + " | ".join((*head, "verdict")) + " |", "|---" * 8 + "|"]
    for row in rows:
        numbers = [f"{row[key]:.1e}" for key in head[2:]]
        verdict = "; ".join(row["faults"]).splitlines()[-1:] or ["within bounds"]
        cells = [str(row["processes"]), row["case"], *numbers, *verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
