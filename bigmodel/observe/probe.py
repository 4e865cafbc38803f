"""Looking at this machine: which GPUs it has, or what its cores and memory can do.

[Note: No CUDA here]
A process that has initialised CUDA cannot fork into workers that use it. GPUs are
counted by torch, which asks NVML, and named by NVML itself.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from bigmodel.clusters import DEVICES, Cluster, Device, Link, Node
from bigmodel.clusters.devices import DeviceRow
from bigmodel.errors import InvalidClusterError, MissingDependencyError, Violation

_GLOO = Link(bandwidth=0.4e9, latency=300e-6)
"""Between processes of one machine that talk by gloo: TCP over the loopback device,
where the kernel copies every byte twice. It cannot be measured without starting
processes. An all-gather of two processes on two busy cores (torch 2.13) took 0.65 ms
for 4 bytes and reached 0.2 to 0.3 GB/s for 4 to 64 MB."""
_SECONDS = 0.12
"""Time that one measurement may take."""
_MEMORY_TOLERANCE = 0.06
"""How far the memory that a driver reports may be from a row's: reserved pages, ECC."""


def probe_cluster(world_size: int | None = None) -> Cluster:
    """Return the cluster that this job runs on.

    Machines of a job are taken to be equal. Without GPUs every process gets an equal
    share of this machine's cores and memory.

    Args:
        world_size: Processes of the job; None: one for every GPU, or one without GPUs.

    Raises:
        MissingDependencyError: There are GPUs and no nvidia-ml-py to ask about them.
        InvalidClusterError: The GPUs are in no table, or the processes do not spread
            evenly over machines.
    """
    count = torch.cuda.device_count()
    if count == 0:
        return cpu_cluster(world_size or 1)
    name, memory = _first_gpu()
    row = match_device(name, memory)
    world = world_size or count
    per_node = min(count, world)
    if world % per_node:
        raise InvalidClusterError(
            Violation(
                field="processes of the job",
                got=world,
                rule=f"they must fill machines of {count} GPUs evenly",
                cure="start one process for every GPU",
            )
        )
    device = Device(
        name=row.device.name,
        memory=memory,
        bandwidth=row.device.bandwidth,
        peaks=row.device.peaks,
        source=row.device.source,
    )
    return Cluster(
        name=f"{world // per_node}x{per_node}x{device.name}",
        node=Node(
            device=device,
            count=per_node,
            link=row.link,
            host_memory=psutil.virtual_memory().total,
        ),
        num_nodes=world // per_node,
        link=row.network,
    )


def match_device(name: str, memory: int) -> DeviceRow:
    """Return the row of the table for a GPU, by the driver's name and its memory.

    Raises:
        InvalidClusterError: No row is that GPU.
    """
    rows = [
        row
        for key, row in DEVICES
        if _is_named(key.rpartition("-")[0], name)
        and abs(row.device.memory - memory) <= _MEMORY_TOLERANCE * memory
    ]
    if not rows:
        raise InvalidClusterError(
            f"this machine's GPU {name!r} with {memory} bytes is in no table; write a "
            "cluster file with its figures (bigmodel.clusters.document.save shows the "
            f"form) and name it as the cluster; known devices: "
            f"{', '.join(DEVICES.names())}"
        )
    return min(rows, key=lambda row: abs(row.device.memory - memory))


def cpu_cluster(count: int) -> Cluster:
    """Return this machine's cores as `count` devices, by measuring what one can do.

    Takes about a second. What was measured is what can be reached, so the shares of
    the peak are 1.

    Raises:
        InvalidClusterError: The count is not positive.
    """
    if count < 1:
        raise InvalidClusterError(
            Violation(field="cluster", got=f"{count}xcpu", rule="counts are at least 1")
        )
    cores = _num_cores()
    threads = max(1, cores // count)
    with _threads(threads):
        single = _matmul_rate(torch.float32, 768)
        half = _matmul_rate(torch.bfloat16, 384)
        moved = _copy_rate()
        launch = _launch_seconds()
    with _threads(cores):
        # The processes share one memory: none gets more than its part of all.
        moved = min(moved, _copy_rate() / count)
    memory = psutil.virtual_memory().total
    device = Device(
        name="cpu",
        kind="cpu",
        memory=memory // count,
        bandwidth=moved,
        peaks={"float32": single, "bfloat16": half},
        source=f"measured on this machine with {threads} of {cores} cores",
        efficiency=1.0,
        bandwidth_efficiency=1.0,
        launch_seconds=launch,
    )
    return Cluster(
        name=f"{count}xcpu",
        node=Node(device=device, count=count, link=_GLOO, host_memory=memory),
    )


def _first_gpu() -> tuple[str, int]:
    try:
        import pynvml
    except ImportError:
        raise MissingDependencyError(
            "nvidia-ml-py", "nvidia", "reading this machine's GPUs"
        ) from None
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(handle)
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    finally:
        pynvml.nvmlShutdown()
    return (name.decode() if isinstance(name, bytes) else name), memory


def _is_named(model: str, name: str) -> bool:
    """Say whether a driver's name is that of a model: `L40S` is not `L4`."""
    # Their figures differ from those of the table, which are for the SXM module.
    if model == "H100" and re.search("PCIe|NVL", name):
        return False
    pattern = model.replace("RTX", "RTX ?")
    return bool(re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", name))


def _num_cores() -> int:
    """Count the cores that this process may use; hyper-threads count as one core."""
    physical = psutil.cpu_count(logical=False) or 1
    try:
        return max(1, min(physical, len(os.sched_getaffinity(0))))
    except AttributeError:  # not on macOS and Windows
        return physical


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _best_seconds(run: Callable[[], object]) -> float:
    """Return the least seconds of a call: the one that nothing disturbed."""
    run()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def _matmul_rate(dtype: torch.dtype, size: int) -> float:
    left, right = (
        torch.ones(size, size, dtype=dtype),
        torch.ones(size, size, dtype=dtype),
    )
    return 2 * size**3 / _best_seconds(lambda: torch.mm(left, right))


def _copy_rate() -> float:
    source = torch.ones(8 * 1024**2)
    target = torch.empty_like(source)
    # Every byte is read once and written once.
    moved = 2 * source.numel() * source.element_size()
    return moved / _best_seconds(lambda: target.copy_(source))


def _launch_seconds() -> float:
    value, calls = torch.ones(()), 200

    def run() -> None:
        for _ in range(calls):
            torch.add(value, value)

    return _best_seconds(run) / calls
