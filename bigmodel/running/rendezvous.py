"""From processes to a process group, with every reason not to begin found first.

The order matters: a wrong number of processes is seen without talking to anyone, a
missing or different one by reading a key-value store, which cannot hang; only then is
the first collective allowed.

The store is where the ranks meet: a server at MASTER_ADDR:MASTER_PORT, or where
BIGMODEL_INIT says: `env://` (the same), `tcp://host:port`, or a file that all of them
see, `file:///path`. The collectives find each other through it, over NCCL between GPUs
and gloo between CPUs.

Rank 0's process may serve the store. When it fails it stays for a moment, so that the
others can read why.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    distributed_c10d,
)

from bigmodel.errors import UsageError, Violation, WorkerError, WorldError
from bigmodel.plans import Plan
from bigmodel.plans.document import digest
from bigmodel.running.environment import Process, publish
from bigmodel.running.network_interface import choose_interface
from bigmodel.running.port_holder import why_not

_GRACE_SECONDS = 5.0
"""How long a failing rank that serves the store waits for the others to read it."""

_group_number = 0
# Keys of one process group after another in the same store must not mix.


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A process as a member of the job."""

    rank: int
    world: int
    store: Store
    """Key-value store of the job."""
    owns_group: bool
    """Whether the process group was made here, and is to be destroyed here."""
    published: tuple[str, ...] = ()
    """Environment variables that were set here, and are to be unset with it."""


def join(
    plan: Plan,
    process: Process,
    device: torch.device,
    timeout: float,
) -> Membership:
    """Meet the other ranks and set up the process group.

    Args:
        plan: The plan, which must be the same on every rank.
        process: What the environment says about this process.
        device: Where this rank computes.
        timeout: Seconds to wait for a rank, here and in every collective.

    Raises:
        WorldError: The processes do not match the plan, or their plans differ.
        UsageError: BIGMODEL_INIT names no place to meet.
        WorkerError: A rank never came.
    """
    ready = dist.is_initialized()
    rank = dist.get_rank() if ready else process.rank
    started = dist.get_world_size() if ready else process.world_size
    _check_world(plan, started)
    process, file = (process, None) if ready else _meeting_place(process)
    store, serves = _open_store(process, file, ready, timeout)
    _call_roll(plan, rank, store, serves, timeout)
    published: tuple[str, ...] = ()
    if not ready:
        published = publish(process)
        choose_interface(process)
        dist.init_process_group(
            group_backend(device.type),
            store=PrefixStore("group", store),
            rank=rank,
            world_size=started,
            timeout=timedelta(seconds=timeout),
        )
    return Membership(
        rank=rank,
        world=started,
        store=store,
        owns_group=not ready,
        published=published,
    )


def group_backend(device_type: str) -> str:
    """Return the backends of the process group, as torch spells them.

    The CPU is always reachable: for objects, checkpoints, and offloaded gradients.
    """
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def _check_world(plan: Plan, started: int) -> None:
    if started == plan.world:
        return
    raise WorldError(
        Violation(
            field="processes",
            got=started,
            rule=f"the plan is for {plan.world} ({plan.describe()})",
            cure=f"start {plan.world} (bigmodel run SCRIPT --plan PLAN does, or "
            f"torchrun --nproc-per-node {plan.world}), or plan again for {started}",
        )
    )


def _open_store(
    process: Process, file: Path | None, ready: bool, timeout: float
) -> tuple[Store, bool]:
    """Return a store of this job alone, and whether this process serves it."""
    global _group_number
    _group_number += 1
    prefix = f"bigmodel/{process.job}/{_group_number}"
    if ready:
        # No public function gives the store of a group that the user has made.
        return PrefixStore(prefix, distributed_c10d._get_default_store()), False
    if process.world_size == 1:
        return PrefixStore(prefix, HashStore()), False
    if file is not None:
        store = FileStore(str(file), process.world_size)
        store.set_timeout(timedelta(seconds=timeout))
        return PrefixStore(prefix, store), False
    serves = process.rank == 0 and not process.store_runs
    port = process.master_port
    try:
        store = TCPStore(
            process.master_address,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout),
            # Waiting is done by the roll call, which can name who is missing.
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistError, RuntimeError) as error:
        if serves:
            raise WorldError(
                f"rank 0 cannot listen at port {port}: {why_not(port, error)}; give "
                "another one (MASTER_PORT, or the launcher's --master-port or "
                "--master_port), or start with bigmodel run, which takes a free one"
            ) from error
        raise WorkerError(
            f"rank {process.rank} waited {timeout:g} s for rank 0 at "
            f"{process.master_address}:{port}, which never came"
        ) from error
    return PrefixStore(prefix, store), serves


def _meeting_place(process: Process) -> tuple[Process, Path | None]:
    """Return the process with the address of its `init_method`, or the shared file."""
    method = process.init_method or "env://"
    parts = urlsplit(method)
    if parts.scheme == "env":
        return process, None
    if parts.scheme == "file" and not parts.netloc and parts.path not in ("", "/"):
        file = Path(parts.path)
        if file.parent.is_dir():
            return process, file
        raise UsageError(
            Violation(
                field="BIGMODEL_INIT",
                got=method,
                rule=f"there is no folder {str(file.parent)!r} on this machine",
                cure="name a file in a folder that all ranks see",
            )
        )
    with contextlib.suppress(ValueError):
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            place = replace(
                process,
                master_address=parts.hostname,
                master_port=parts.port,
                # The launcher's store is at the address of the launcher.
                store_runs=process.store_runs
                and (parts.hostname, parts.port)
                == (process.master_address, process.master_port),
            )
            return place, None
    raise UsageError(
        Violation(
            field="BIGMODEL_INIT",
            got=method,
            rule="ranks meet at env://, tcp://HOST:PORT or file:///PATH",
        )
    )


def _call_roll(
    plan: Plan, rank: int, store: Store, serves: bool, timeout: float
) -> None:
    world = plan.world
    keys = [f"plan/{other}" for other in range(world)]
    try:
        if store.add(f"came/{rank}", 1) > 1:
            raise WorldError(
                f"rank {rank} is there twice: another job, or an earlier one, met at "
                "the same place; give every job a port (MASTER_PORT) or a file "
                "(BIGMODEL_INIT) of its own"
            )
        store.set(keys[rank], digest(plan))
        _wait_for_all(rank, keys, store, timeout)
        digests = [store.get(key).decode() for key in keys]
        others = [other for other in range(world) if digests[other] != digests[0]]
        if others:
            raise WorldError(
                f"the plans differ: {_named(others)} read another plan than rank 0 "
                f"(digest {digests[0]}; here, on rank {rank}, {digests[rank]}: "
                f"{plan.describe()}); give the same plan file to every process"
            )
    except (WorldError, WorkerError):
        with contextlib.suppress(dist.DistError, RuntimeError):
            store.set(f"left/{rank}", "")
            if serves:
                _linger(store, rank, world)
        raise


def _wait_for_all(rank: int, keys: list[str], store: Store, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    try:
        while not store.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.02)
    except (dist.DistError, RuntimeError, TimeoutError):
        try:
            missing = [
                index for index, key in enumerate(keys) if not store.check([key])
            ]
        except (dist.DistError, RuntimeError):
            missing = [0]
        raise WorkerError(
            f"{_named(missing)} never came: rank {rank} waited {timeout:g} s; look at "
            "the output of these processes, or raise prepare(..., timeout=)"
        ) from None


def _linger(store: Store, rank: int, world: int) -> None:
    came = [
        other
        for other in range(world)
        if other != rank and store.check([f"plan/{other}"])
    ]
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        if all(store.check([f"left/{other}"]) for other in came):
            return
        time.sleep(0.05)


def _named(ranks: list[int]) -> str:
    label = "rank" if len(ranks) == 1 else "ranks"
    return f"{label} {', '.join(map(str, ranks))}"
