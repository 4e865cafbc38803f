"""Predicted against measured memory on one GPU, all three numbers, in 8 minutes.

    python -m benchmarks.memory_accuracy.gpu --out FOLDER [--minutes 8] [--only WORDS]

Needs torch, transformers and this library; with nvidia-ml-py the device total is what
the driver counts, without it what `torch.cuda.mem_get_info` says. Every case has a
process of its own, so that none finds another's cache, context or peak. What is known
is written after each case. Without a GPU tiny models are trained on the CPU, whose
allocator says allocated bytes only: a test of everything but CUDA.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

import bigmodel
from benchmarks.memory_accuracy.one_device_cases import Case, Scale, cases
from benchmarks.memory_accuracy.one_device_run import run_case
from benchmarks.versions import versions
from bigmodel.clusters import Cluster
from bigmodel.errors import MissingDependencyError
from bigmodel.observe.probe import match_device, probe_cluster
from bigmodel.units import format_bytes

NUMBERS = ("allocated", "reserved", "device_total")
_LONGEST = 180.0
"""Seconds after which a case is given up."""
_IMPORTED = (
    "torch",
    "transformers",
    "benchmarks.memory_accuracy.one_device_run",
)


@dataclass(slots=True, kw_only=True)
class Record:
    """What is known so far, written whenever something is added."""

    path: Path
    cluster: Cluster
    minutes: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)

    def add(self, case: Case, found: dict[str, Any]) -> None:
        """Note what became of a case."""
        if "failed" in found:
            self.failed.append({"case": case.name, "reason": found["failed"]})
        elif "left_out" in found:
            self.leave_out(case, found["left_out"])
        else:
            self.rows.append({"case": case.name, **found, "errors": _errors(found)})
        self.write()

    def leave_out(self, case: Case, reason: str) -> None:
        """Note that a case was not run."""
        self.left_out.append({"case": case.name, "reason": reason})

    def write(self) -> None:
        """Write the file; a reader finds the old one or the new one, never half."""
        device = self.cluster.device
        document = {
            "what": "bytes of one device in steady steps, predicted and measured",
            "date": str(date.today()),
            "device": {
                "name": device.name,
                "kind": device.kind,
                "bytes": device.memory,
            },
            "versions": {
                "python": platform.python_version(),
                "cuda": torch.version.cuda,
                **versions(("torch", "transformers", "nvidia-ml-py")),
            },
            "minutes": self.minutes,
            "rows": self.rows,
            "left_out": self.left_out,
            "failed": self.failed,
        }
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(document, indent=1) + "\n")
        beside.replace(self.path)


def run(wanted: Sequence[Case], record: Record) -> None:
    """Run cases one after another, as many as the minutes allow."""
    scale: Scale = "real" if record.cluster.device.kind == "cuda" else "tiny"
    processes = _clean_processes()
    start, slowest = time.monotonic(), 0.0
    end = start + 60 * record.minutes
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(wanted):
            begin = time.monotonic()
            if begin + slowest >= end:
                record.leave_out(case, f"no time within {record.minutes:g} minutes")
                continue
            out = Path(folder) / f"{number}.json"
            process = processes.Process(
                target=run_case, args=(case, scale, record.cluster, out)
            )
            process.start()
            process.join(min(_LONGEST, end - begin))
            found = _outcome(process, out)
            record.add(case, found)
            slowest = max(slowest, time.monotonic() - begin)
            _show(case, found)
    record.write()


def _clean_processes() -> ForkServerContext:
    """Return a way to start processes that have imported all and touched no device."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(list(_IMPORTED))
    return processes


def _outcome(process: Any, out: Path) -> dict[str, Any]:
    if process.is_alive():
        process.kill()
        process.join()
        return {"failed": "it took too long and was ended"}
    if not out.is_file():
        return {"failed": f"its process ended with code {process.exitcode}"}
    return json.loads(out.read_text())


def _errors(found: dict[str, Any]) -> dict[str, float | None]:
    """Return predicted over measured less one, where both are known."""
    predicted, measured = found["predicted"], found["measured"]
    return {
        name: predicted[name] / measured[name] - 1 if measured[name] else None
        for name in (*NUMBERS, "seconds")
    }


def _show(case: Case, found: dict[str, Any]) -> None:
    if "measured" not in found:
        print(f"{case.name:44} {found.get('failed') or found['left_out']}", flush=True)
        return
    words = [
        f"{name} {format_bytes(found['measured'][name])} {error:+.2%}"
        for name, error in _errors(found).items()
        if name in NUMBERS and error is not None
    ]
    print(f"{case.name:44} {', '.join(words)}", flush=True)


def machine_without_context() -> Cluster:
    """Return `this_machine` as another process sees it: a context here would count."""
    with ProcessPoolExecutor(1, mp_context=_clean_processes()) as pool:
        return pool.submit(this_machine).result()


def this_machine() -> Cluster:
    """Return the first GPU of this machine, or its CPU, as a cluster of one device.

    Raises:
        InvalidClusterError: The GPU is in no table.
    """
    try:
        return probe_cluster(1)
    except MissingDependencyError:
        known = torch.cuda.get_device_properties(0)
        row = match_device(known.name, known.total_memory)
        named = bigmodel.cluster(f"1x{row.device.name}")
        device = replace(row.device, memory=known.total_memory)
        return replace(named, node=replace(named.node, device=device))


def main() -> None:
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the file")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wanted = [case for case in cases() if not args.only or case.name in args.only]
    if not wanted:
        names = "', '".join(case.name for case in cases())
        parser.error(f"no case has one of these names; there are '{names}'")
    args.out.mkdir(parents=True, exist_ok=True)
    cluster = machine_without_context()
    path = args.out / f"memory_accuracy_one_{cluster.device.name}.json"
    record = Record(path=path, cluster=cluster, minutes=args.minutes)
    run(wanted, record)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
