"""The environment of this process: the only file that reads or writes `os.environ`.

launcher            rank           local rank      world          local world
bigmodel run        the same as torchrun
torchrun            RANK           LOCAL_RANK      WORLD_SIZE     LOCAL_WORLD_SIZE
accelerate launch   the same as torchrun
deepspeed           RANK           LOCAL_RANK      WORLD_SIZE     LOCAL_SIZE
horovodrun          HOROVOD_RANK   HOROVOD_LOCAL_  HOROVOD_SIZE   HOROVOD_LOCAL_SIZE
                                   RANK
mpirun (Open MPI)   OMPI_COMM_     OMPI_COMM_      OMPI_COMM_     OMPI_COMM_WORLD_
                    WORLD_RANK     WORLD_LOCAL_    WORLD_SIZE     LOCAL_SIZE
                                   RANK
mpiexec (MPICH)     PMI_RANK       MPI_LOCALRANKID PMI_SIZE       MPI_LOCALNRANKS
srun                SLURM_PROCID   SLURM_LOCALID   SLURM_NTASKS   not said
none                0              0               1              1

The first row that is there counts: mpirun inside a SLURM job starts mpirun's ranks.
Where they meet: MASTER_ADDR and MASTER_PORT, or BIGMODEL_INIT.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bigmodel.errors import Violation, WorldError

_DEFAULT_PORT = 29500
"""Port of torchrun and deepspeed when none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process among those that were started together."""

    launcher: str
    """Who started it: `bigmodel run`, `torchrun`, `deepspeed`, `horovodrun`, `mpirun`,
    `mpiexec`, `srun`, `none`, or `unknown`."""
    rank: int
    local_rank: int
    """Index among the processes of this machine."""
    world_size: int
    local_world_size: int | None
    """Processes of this machine; None where the launcher does not say."""
    master_address: str
    """Machine of rank 0, where the store listens."""
    master_port: int
    store_runs: bool
    """Whether the launcher already serves a store at that address."""
    job: str = ""
    """What the launcher calls the job; empty where it has no name."""
    init_method: str | None = None
    """Where the ranks meet, if not at the address: BIGMODEL_INIT."""
    plan_path: str | None = None
    """Plan file that the launcher named."""


def read_process() -> Process:
    """Return what the environment says about this process.

    Raises:
        WorldError: The environment contradicts itself.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_ranks(env)
    if "HOROVOD_RANK" in env and "HOROVOD_SIZE" in env:
        return _from_horovod(env)
    if "OMPI_COMM_WORLD_RANK" in env and "OMPI_COMM_WORLD_SIZE" in env:
        return _from_open_mpi(env)
    if "PMI_RANK" in env and "PMI_SIZE" in env and "SLURM_PROCID" not in env:
        return _from_mpich(env)
    # Without a step, SLURM_PROCID is that of the batch script, which runs alone.
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        return _from_slurm(env)
    return Process(
        launcher="none",
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        master_address=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", _DEFAULT_PORT),
        store_runs=False,
        init_method=env.get("BIGMODEL_INIT"),
        plan_path=env.get("BIGMODEL_PLAN"),
    )


def _from_ranks(env: Mapping[str, str]) -> Process:
    if "BIGMODEL_RUN_ID" in env:
        launcher = "bigmodel run"
    elif "TORCHELASTIC_RUN_ID" in env:
        launcher = "torchrun"
    elif "CROSS_RANK" in env and "LOCAL_SIZE" in env:
        launcher = "deepspeed"
    else:
        launcher = "unknown"
    rank = _number(env, "RANK", 0)
    local = env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE"))
    return Process(
        launcher=launcher,
        rank=rank,
        local_rank=_number(env, "LOCAL_RANK", rank),
        world_size=_number(env, "WORLD_SIZE", 1),
        local_world_size=None if local is None else int(local),
        master_address=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", _DEFAULT_PORT),
        store_runs=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job=_job_of_ranks(env),
        init_method=env.get("BIGMODEL_INIT"),
        plan_path=env.get("BIGMODEL_PLAN"),
    )


def _job_of_ranks(env: Mapping[str, str]) -> str:
    name = env.get("TORCHELASTIC_RUN_ID", "")
    # torchrun's store outlives its workers: those started again meet anew.
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{name}/{attempt}" if name else ""


def _from_slurm(env: Mapping[str, str]) -> Process:
    job = _number(env, "SLURM_JOB_ID", 0)
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    return Process(
        launcher="srun",
        rank=_number(env, "SLURM_PROCID", 0),
        local_rank=_number(env, "SLURM_LOCALID", 0),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS", 0)
        or _number(env, "SLURM_NTASKS", 1),
        local_world_size=None,
        master_address=env.get("MASTER_ADDR") or first_host(hosts),
        # Jobs that share a machine must not share a port.
        master_port=_number(env, "MASTER_PORT", 20000 + job % 12000),
        store_runs=False,
        job=f"{job}.{env.get('SLURM_STEP_ID', '')}",
        init_method=env.get("BIGMODEL_INIT"),
        plan_path=env.get("BIGMODEL_PLAN"),
    )


def _from_horovod(env: Mapping[str, str]) -> Process:
    # The launcher's own port differs from job to job; theirs must too.
    launcher_port = _number(env, "HOROVOD_GLOO_RENDEZVOUS_PORT", _DEFAULT_PORT)
    local = env.get("HOROVOD_LOCAL_SIZE")
    return Process(
        launcher="horovodrun",
        rank=_number(env, "HOROVOD_RANK", 0),
        local_rank=_number(env, "HOROVOD_LOCAL_RANK", 0),
        world_size=_number(env, "HOROVOD_SIZE", 1),
        local_world_size=None if local is None else int(local),
        # Only on one machine, or where horovodrun was called on that of rank 0, is its
        # address the right one; elsewhere MASTER_ADDR says more.
        master_address=env.get("MASTER_ADDR")
        or env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", 20000 + launcher_port % 12000),
        store_runs=False,
        init_method=env.get("BIGMODEL_INIT"),
        plan_path=env.get("BIGMODEL_PLAN"),
    )


def _from_open_mpi(env: Mapping[str, str]) -> Process:
    return _from_mpi(
        env,
        launcher="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", ""),
    )


def _from_mpich(env: Mapping[str, str]) -> Process:
    return _from_mpi(
        env,
        launcher="mpiexec",
        rank="PMI_RANK",
        local_rank="MPI_LOCALRANKID",
        size="PMI_SIZE",
        local_size="MPI_LOCALNRANKS",
        job="",
    )


def _from_mpi(
    env: Mapping[str, str],
    *,
    launcher: str,
    rank: str,
    local_rank: str,
    size: str,
    local_size: str,
    job: str,
) -> Process:
    """Read the variables of one kind of MPI; none says where rank 0 is."""
    world = _number(env, size, 1)
    local_world = _number(env, local_size, 0) or None
    init = env.get("BIGMODEL_INIT")
    alone = local_world == world
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if not alone and missing and not init:
        raise WorldError(
            Violation(
                field=" and ".join(missing),
                got=None,
                rule=f"{launcher} starts {world} processes on several machines and "
                "does not say where rank 0 is",
                cure=f"pass them to every process ({launcher} -x MASTER_ADDR=HOST -x "
                "MASTER_PORT=29500, with the host of rank 0), or a file that all see: "
                "BIGMODEL_INIT=file:///shared/job1"
                if launcher == "mpirun"
                else "set them to the host of rank 0 and a free port, or "
                "BIGMODEL_INIT=file:///shared/job1",
            )
        )
    return Process(
        launcher=launcher,
        rank=_number(env, rank, 0),
        local_rank=_number(env, local_rank, _number(env, rank, 0)),
        world_size=world,
        local_world_size=local_world,
        master_address=env.get("MASTER_ADDR", "127.0.0.1"),
        # Jobs that share a machine must not share a port, where they have a name.
        master_port=_number(
            env,
            "MASTER_PORT",
            20000 + zlib.crc32(job.encode()) % 12000 if job else _DEFAULT_PORT,
        ),
        store_runs=False,
        job=job if alone else "",
        init_method=init,
        plan_path=env.get("BIGMODEL_PLAN"),
    )


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM list such as `gpu[003-007,9],login`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", hosts)
    if match is None:
        return "127.0.0.1"
    return "".join(part or "" for part in match.groups())


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise WorldError(
            Violation(
                field=f"environment variable {name}",
                got=text,
                rule="it must be a whole number",
                cure="start the script with bigmodel run, torchrun, deepspeed, mpirun "
                "or srun",
            )
        ) from None


def publish(process: Process) -> tuple[str, ...]:
    """Set the variables that libraries expect, where the launcher did not.

    DeepSpeed reads LOCAL_RANK by itself; srun does not set it.

    Returns:
        The names of those that were set, for `withdraw`.
    """
    values = {
        "RANK": process.rank,
        "LOCAL_RANK": process.local_rank,
        "WORLD_SIZE": process.world_size,
        "MASTER_ADDR": process.master_address,
        "MASTER_PORT": process.master_port,
    }
    missing = tuple(name for name in values if name not in os.environ)
    for name in missing:
        os.environ[name] = str(values[name])
    return missing


def withdraw(names: Iterable[str]) -> None:
    """Unset what `publish` has set: other libraries would take it for a launcher's."""
    for name in names:
        os.environ.pop(name, None)


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables that a library reads when it starts in this process."""
    os.environ.update(values)


def error_file() -> Path | None:
    """Return where this rank is to report its failure; None: nobody asked for it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return Path(path)
    if folder := os.environ.get("BIGMODEL_REPORTS"):
        return Path(folder) / f"rank-{read_process().rank}.json"
    return None


def variable(name: str) -> str | None:
    """Return a variable that a library reads; None when it is not set."""
    return os.environ.get(name)


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES, numbers or UUIDs; None when it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def threads_per_worker(processes: int) -> str:
    """Return OMP_NUM_THREADS for each of a machine's processes.

    The user's choice, or as many threads as there are cores for each.
    """
    default = max(1, (os.cpu_count() or 1) // processes)
    return os.environ.get("OMP_NUM_THREADS") or str(default)


def choose_device(process: Process) -> torch.device:
    """Return the GPU of this process, or the CPU on a machine without GPUs.

    Raises:
        WorldError: There are more processes than GPUs on this machine.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # These may show each of their tasks one GPU, which is number 0 for all of them.
    alone = process.launcher in ("srun", "mpirun", "mpiexec") and count == 1
    index = 0 if alone else process.local_rank
    if index >= count:
        raise WorldError(
            Violation(
                field="processes on this machine",
                got=process.local_world_size or index + 1,
                rule=f"each needs a GPU of its own, and {count} can be seen",
                cure=f"start {count}, or make more visible by CUDA_VISIBLE_DEVICES",
            )
        )
    return torch.device("cuda", index)
