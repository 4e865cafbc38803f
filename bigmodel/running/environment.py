"""The environment of this process: the only file that reads or writes `os.environ`.

launcher            rank           local rank      world          local world
torchrun            RANK           LOCAL_RANK      WORLD_SIZE     LOCAL_WORLD_SIZE
accelerate launch   the same as torchrun
deepspeed           RANK           LOCAL_RANK      WORLD_SIZE     LOCAL_SIZE
srun                SLURM_PROCID   SLURM_LOCALID   SLURM_NTASKS   not said
horovodrun          HOROVOD_RANK   HOROVOD_LOCAL_  HOROVOD_SIZE   HOROVOD_LOCAL_SIZE
                                   RANK
none                0              0               1              1
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bigmodel.errors import Violation, WorldError

_DEFAULT_PORT = 29500
"""Port of torchrun and deepspeed when none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process among those that were started together."""

    launcher: str
    """Who started it: `torchrun`, `deepspeed`, `srun`, `horovodrun`, `none`, or
    `unknown`."""
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
    plan_path: str | None
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
        plan_path=env.get("BIGMODEL_PLAN"),
    )


def _from_ranks(env: Mapping[str, str]) -> Process:
    if "TORCHELASTIC_RUN_ID" in env:
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
        plan_path=env.get("BIGMODEL_PLAN"),
    )


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
        master_port=_number(env, "MASTER_PORT", 20000 + job % 20000),
        store_runs=False,
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
                cure="start the script with torchrun, deepspeed, srun or bigmodel run",
            )
        ) from None


def publish(process: Process) -> None:
    """Set the variables that libraries expect, where the launcher did not.

    DeepSpeed reads LOCAL_RANK by itself; srun does not set it.
    """
    for name, value in (
        ("RANK", process.rank),
        ("LOCAL_RANK", process.local_rank),
        ("WORLD_SIZE", process.world_size),
        ("MASTER_ADDR", process.master_address),
        ("MASTER_PORT", process.master_port),
    ):
        os.environ.setdefault(name, str(value))


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables that a library reads when it starts in this process."""
    os.environ.update(values)


@contextmanager
def variables_for_workers(plan_path: str, processes: int) -> Iterator[None]:
    """Set what worker processes inherit, and restore the environment afterwards.

    Threads: as many per process as the machine has cores for, unless the user chose.
    """
    threads = max(1, (os.cpu_count() or 1) // processes)
    changes = {
        "BIGMODEL_PLAN": plan_path,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def choose_device(process: Process) -> torch.device:
    """Return the GPU of this process, or the CPU on a machine without GPUs.

    Raises:
        WorldError: There are more processes than GPUs on this machine.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # srun may show each of its tasks one GPU, which is number 0 for all of them.
    index = 0 if process.launcher == "srun" and count == 1 else process.local_rank
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
