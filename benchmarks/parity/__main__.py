"""The whole matrix as a table.

    python -m benchmarks.parity [--quick] [--world 2] [--only NAME] --out FOLDER

Then a few of the cases under every launcher that is found here; their names begin with
`under-LAUNCHER`. Writes FOLDER/parity.json and FOLDER/parity.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.layouts import not_here
from benchmarks.parity.cases import WORLDS, Case, cases
from benchmarks.parity.comparison import Deviation, deviation, run_matrix
from benchmarks.parity.launchers import (
    LAUNCHERS,
    launched_cases,
    launched_deviation,
    run_launcher,
)
from benchmarks.parity.launchers import WORLD as LAUNCHED_WORLD

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
        rows += _of_world(world, options.only, quick=options.quick)
    if options.world in (None, LAUNCHED_WORLD):
        rows += _of_launchers(options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "parity.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / "parity.md").write_text(_table(rows))
    bad = sum(bool(row["faults"]) for row in rows)
    absent = sum(bool(row["not_run"]) for row in rows)
    print(f"{len(rows)} cases, {bad} beyond their bounds, {absent} not run")
    raise SystemExit(bad > 0)


def _of_world(world: int, only: list[str], *, quick: bool) -> Iterator[dict]:
    chosen = [
        case
        for case in cases(world, quick=quick)
        if not only or case.name.startswith(tuple(only))
    ]
    if not chosen:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = run_matrix(world, folder, *only, quick=quick, seconds=SECONDS)
        for case in chosen:
            reason = not_here(case.plan)
            found = Deviation() if reason else deviation(case, folder, output)
            yield _row(world, case, found, reason)


def _of_launchers(only: list[str]) -> Iterator[dict]:
    for launcher in LAUNCHERS:
        prefix = f"under-{launcher.name}"
        if only and not prefix.startswith(tuple(only)):
            continue
        reason = launcher.not_here()
        with tempfile.TemporaryDirectory() as name:
            output = "" if reason else run_launcher(launcher, Path(name))
            for case in launched_cases():
                found = Deviation()
                if not reason:
                    found = launched_deviation(launcher, case, Path(name), output)
                named = replace(case, name=f"{prefix}-{case.name}")
                yield _row(LAUNCHED_WORLD, named, found, reason)


def _row(world: int, case: Case, found: Deviation, reason: str) -> dict:
    faults = [] if reason else found.faults(case)
    verdict = "; ".join(faults)[-300:] or "ok"
    said = f"losses {found.losses:.1e} weights {found.weights:.1e} {verdict}"
    print(
        f"{world} {case.name:36} {f'not run: {reason}' if reason else said}", flush=True
    )
    return {
        "processes": world,
        "case": case.name,
        "plan": case.plan.describe(),
        **asdict(found),
        "faults": faults,
        "not_run": reason,
    }


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
