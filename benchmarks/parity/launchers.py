"""The launchers under which the same cases run: a dimension of the matrix.

Every one starts two ranks of `worker.py` on this machine. Ranks meet by what their
launcher says, or by variables that say the same (`forked.py`); the process group is
made by `bigmodel.prepare`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.parity.cases import Case, cases
from benchmarks.parity.comparison import Deviation, deviation
from benchmarks.parity.forked import WAYS
from benchmarks.parity.slurm_cluster import one_node_cluster
from bigmodel.plans.document import save

WORLD = 2
WORKER = Path(__file__).with_name("worker.py")
FORKED = Path(__file__).with_name("forked.py")
CASES = ("ddp-mlp-plain", "fsdp2-mlp-plain", "gpipe-mlp-plain")
"""One plan of each kind: replicas, shards, stages."""

Words = Callable[[Path, Path], list[str]]
"""From the plan's file and a folder of the launch to what stands before the script."""


@dataclass(frozen=True)
class Launcher:
    """A way of starting the ranks."""

    name: str
    words: Words
    says: str
    """What `Process.launcher` must be."""
    tools: tuple[str, ...] = ()
    """Programs that a machine may lack."""
    library: str = ""
    """Python library that may be missing."""
    surroundings: Callable[[Path], AbstractContextManager[Mapping[str, str]]] = field(
        default=lambda folder: nullcontext({})
    )
    """What must run meanwhile; gives further variables."""

    def not_here(self) -> str:
        """Return why it cannot be used on this machine; empty where it can."""
        missing = [tool for tool in self.tools if find_tool(tool) is None]
        if self.library and importlib.util.find_spec(self.library) is None:
            missing.append(self.library)
        return f"{', '.join(missing)} is missing" if missing else ""


def find_tool(name: str) -> str | None:
    """Return the path of a program, also where only administrators look for it."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def beside_python(name: str) -> str:
    """Return a program of this Python environment."""
    return str(Path(sys.executable).with_name(name))


def clean_environment() -> dict[str, str]:
    """Return the environment without what another launcher may have left in it."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    prefixes = ("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "BIGMODEL_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(prefixes)
    }
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _torchrun(plan: Path, folder: Path) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*words, f"--nproc-per-node={WORLD}"]


def _deepspeed(*options: str) -> Words:
    return lambda plan, folder: [
        beside_python("deepspeed"),
        f"--num_gpus={WORLD}",
        f"--master_port={free_port()}",
        *options,
    ]


def _accelerate(plan: Path, folder: Path) -> list[str]:
    # Without --multi_gpu it starts one process, whatever --num_processes says.
    words = [beside_python("accelerate"), "launch", "--multi_gpu"]
    words += [f"--num_processes={WORLD}", "--num_machines=1", "--mixed_precision=no"]
    return [*words, "--dynamo_backend=no", f"--main_process_port={free_port()}"]


def _mpirun(plan: Path, folder: Path) -> list[str]:
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [*words, "-n", str(WORLD), sys.executable]


def _srun(plan: Path, folder: Path) -> list[str]:
    return ["srun", f"--ntasks={WORLD}", "--overcommit", sys.executable]


def _forked(way: str) -> Words:
    return lambda plan, folder: [sys.executable, str(FORKED), way]


LAUNCHERS = (
    Launcher(
        "bigmodel-run",
        lambda plan, folder: [
            *(beside_python("bigmodel"), "run", "--plan", str(plan)),
            *("--log-folder", str(folder / "logs")),
        ],
        "bigmodel run",
    ),
    Launcher("torchrun", _torchrun, "torchrun"),
    Launcher("deepspeed", _deepspeed(), "deepspeed", library="deepspeed"),
    Launcher(
        "deepspeed-no-local-rank",
        _deepspeed("--no_local_rank"),
        "deepspeed",
        library="deepspeed",
    ),
    Launcher("accelerate", _accelerate, "torchrun", library="accelerate"),
    Launcher("mpirun", _mpirun, "mpirun", tools=("mpirun",)),
    Launcher(
        "srun",
        _srun,
        "srun",
        tools=("slurmctld", "slurmd", "munged", "srun"),
        surroundings=one_node_cluster,
    ),
    *(Launcher(way, _forked(way), says) for way, says in WAYS.items()),
)


def launched_cases() -> list[Case]:
    """Return what runs under every launcher."""
    return [case for case in cases(WORLD) if case.name in CASES]


def run_launcher(
    launcher: Launcher, folder: Path, names: Sequence[str] = CASES, seconds: float = 240
) -> str:
    """Run the cases under a launcher, and return what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = save(launched_cases()[0].plan, folder / "plan.json")
    with launcher.surroundings(folder) as further:
        words = launcher.words(plan, folder)
        if launcher.name not in WAYS:
            words.append(str(WORKER))
        if launcher.says == "bigmodel run":
            words.append("--")
        return finish(
            [*words, str(folder), "launched", *names],
            {**clean_environment(), **further},
            seconds,
        )


def launched_deviation(
    launcher: Launcher, case: Case, folder: Path, output: str
) -> Deviation:
    """Return how far a case is from one process, or that another launcher ran it."""
    found = deviation(case, folder, output)
    if found.fault:
        return found
    says = torch.load(folder / f"{case.name}.pt")["launcher"]
    if says != launcher.says:
        return Deviation(fault=f"the ranks took {launcher.name} for {says}")
    return found


def finish(words: Sequence[str], env: Mapping[str, str], seconds: float) -> str:
    """Run a command to its end, or end it, and return what it printed."""
    with (
        subprocess.Popen(
            words,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process,
        ending_group(process),
    ):
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"still running after {seconds:g} s: {' '.join(words)}"
    return f"{output}\nexit code {process.returncode}"


@contextmanager
def ending_group(process: subprocess.Popen) -> Iterator[None]:
    """End what a process has started in its session, also when it has ended itself."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
