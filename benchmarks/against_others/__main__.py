"""bigmodel and other estimators of memory against the measured peak, on the same cases.

    python -m benchmarks.against_others [--recordings FOLDER] [--out FOLDER]

Measures on the CPU at 2 processes, as `benchmarks.memory_accuracy` does, prints a row
for every case with the error and the seconds of every tool, and a summary by tool.
With --out it also writes FOLDER/against_others_cpu.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from benchmarks.against_others.accelerate_estimator import ACCELERATE
from benchmarks.against_others.bigmodel_estimator import BIGMODEL
from benchmarks.against_others.comparison import (
    Cell,
    Row,
    ask,
    compared_cases,
    summarise,
)
from benchmarks.against_others.deepspeed_estimators import DEEPSPEED
from benchmarks.against_others.estimator import Estimator
from benchmarks.against_others.table import (
    cases_table,
    layouts_table,
    legend,
    markdown,
    plain,
    summary_table,
)
from benchmarks.against_others.textbook import TEXTBOOK, TEXTBOOK_FLASH
from benchmarks.against_others.torch_trackers import TORCH_FAKE, TORCH_REAL
from benchmarks.memory_accuracy.__main__ import measure
from benchmarks.versions import versions

TOOLS: tuple[Estimator, ...] = (
    BIGMODEL,
    DEEPSPEED,
    ACCELERATE,
    TORCH_FAKE,
    TORCH_REAL,
    TEXTBOOK,
    TEXTBOOK_FLASH,
)
LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers")
NOTE = (
    "Predicted over measured peak of allocated bytes of the fullest rank, less one, "
    "and the seconds that the answer took; - no answer, ~ outside of the tool's own "
    "premises. The models are small (1.9 and 0.9 million parameters): buffers and "
    "activations, which some tools do not count, weigh more than in a large one. "
    "bigmodel is developed against these very cases; the others are not."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=Path, help="keep them, or take these")
    parser.add_argument("--out", type=Path, help="write the tables into this folder")
    args = parser.parse_args()
    chosen = list(compared_cases())
    names = [case.name for case in chosen]
    ranks = measure(quick=False, only=names, recordings=args.recordings)
    rows = [ask(case, fullest(ranks, case.name), TOOLS) for case in chosen]
    lines = legend(rows, TOOLS)
    for table in (cases_table(rows), summary_table(rows), layouts_table(rows)):
        print(plain(table), end="\n\n")
    print("\n".join((NOTE, *lines)))
    if args.out:
        save(rows, lines, args.out)


def fullest(ranks: Sequence[dict], case: str) -> int:
    """Return the measured peak of the fullest rank, in bytes."""
    return max(recorded[case]["peak"] for recorded in ranks)


def save(rows: Sequence[Row], lines: Sequence[str], folder: Path) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "against_others_cpu.json"
    path.write_text(json.dumps(_document(rows, lines), indent=1) + "\n")
    print(f"\nwritten to {path}")
    tables = (summary_table(rows), layouts_table(rows), cases_table(rows))
    listed = "\n".join(f"* {line}" for line in lines)
    page = "\n\n".join((NOTE, *map(markdown, tables), listed))
    path.with_suffix(".md").write_text(page + "\n")


def _document(rows: Sequence[Row], lines: Sequence[str]) -> dict:
    return {
        "what": "peak of allocated bytes of a steady step, by several estimators",
        "date": str(date.today()),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": versions(LIBRARIES),
        "tools": list(lines),
        "summary": {
            tool.name: {
                "all": _figures([row.cells[tool.name] for row in rows]),
                "within_its_premises": _figures(
                    [c for row in rows if (c := row.cells[tool.name]).within]
                ),
            }
            for tool in TOOLS
        },
        "rows": [_record(row) for row in rows],
    }


def _figures(cells: Sequence[Cell]) -> dict | None:
    found = summarise(cells)
    return None if found is None else asdict(found)


def _record(row: Row) -> dict:
    return {
        "case": row.case,
        "measured": row.measured,
        "tools": {
            name: {**asdict(cell.answer), "error": cell.error, "seconds": cell.seconds}
            for name, cell in row.cells.items()
        },
    }


if __name__ == "__main__":
    main()
