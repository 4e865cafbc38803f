"""Launching the matrix and comparing it with one process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.parity.cases import Case
from benchmarks.parity.reference import run_alone

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Deviation:
    """Largest differences from one process; `fault` says what is no number."""

    losses: float = 0.0
    evaluation: float = 0.0
    norms: float = 0.0
    """Relative."""
    weights: float = 0.0
    resumed: float = 0.0
    """Of weights after loading and going on, from those that just went on."""
    fault: str = ""

    def faults(self, case: Case) -> list[str]:
        """Return what breaks the bounds of the case."""
        if self.fault:
            return [self.fault]
        bounds = {"losses": case.tolerance, "evaluation": case.tolerance}
        bounds["resumed"] = 1e-6
        if case.exact:
            bounds |= {"norms": 1e-4, "weights": case.tolerance}
        return [
            f"{what} are {getattr(self, what):.2g} off, more than {bound:g}"
            for what, bound in bounds.items()
            if not getattr(self, what) <= bound
        ]


def run_matrix(
    world: int, folder: Path, *names: str, quick: bool, seconds: float
) -> str:
    """Run all cases of a world size in one launch, and return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", str(WORKER), str(folder)]
    command += ["quick" if quick else "all", *names]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.stdout


def deviation(case: Case, folder: Path, output: str) -> Deviation:
    """Return how far a case is from one process."""
    error = folder / f"{case.name}.error"
    if error.exists():
        return Deviation(fault=error.read_text())
    result = folder / f"{case.name}.pt"
    if not result.exists():
        return Deviation(fault=f"the launch ended early:\n{output[-4000:]}")
    got, expected = torch.load(result), run_alone(case)
    if case.clip_norm is not None and max(expected.norms) <= case.clip_norm:
        return Deviation(fault="the case does not clip")
    if got["weights"].keys() != expected.weights.keys():
        names = got["weights"].keys() ^ expected.weights.keys()
        return Deviation(fault=f"names of weights differ: {sorted(names)}")
    if case.resume and got["steps"] != 7:
        return Deviation(fault=f"{got['steps']} steps after loading, not 7")
    return Deviation(
        losses=_largest(got["losses"], expected.losses),
        evaluation=_largest([got["evaluation"]], [expected.evaluation]),
        norms=_largest(got["norms"], expected.norms, relative=True),
        weights=_between(got["weights"], expected.weights),
        resumed=_between(got.get("resumed", {}), got.get("went_on", {})),
    )


def _largest(got: list, expected: list, *, relative: bool = False) -> float:
    pairs = zip(got, expected, strict=True)
    return max((abs(a - b) / (b if relative else 1) for a, b in pairs), default=0.0)


def _between(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(
        (float((got[name] - expected[name]).abs().max()) for name in expected),
        default=0.0,
    )
