"""What a training process holds on a device beside its tensors, one row a device.

Sources, and how sure they are:

    context     CUDA 12 and 13 with lazy loading (the default since 11.7): about 3.05
                MiB a multiprocessor. Read at 107 MiB on 34 (RTX 4060 Ti) and 555 MiB
                on 188 (RTX PRO 6000), ggml-org/llama.cpp#23604; 256 MiB on 82 (RTX
                3090, CUDA 12.8), invoke-ai/InvokeAI#9413; 426 MiB on 142 (RTX 6000
                Ada, CUDA 13), unslothai/unsloth-zoo#1053: 2.95 to 3.15 each.
    kernels     what a training step loads of torch, cuBLAS and NCCL; read between 0.3
                GiB with the context (pytorch/pytorch#107667) and 1.06 GiB with it and a
                first communicator on an H100 (NVIDIA/nccl#1685): nothing closer is
                published.
    workspaces  `parseChosenWorkspaceSize` and `parseCUDABlasLtWorkspaceSize` in torch's
                `aten/src/ATen/cuda/CublasHandlePool.cpp`, for each thread that
                multiplies: that of the forward and autograd's. Inside the allocator.
                cuBLASLt's was as large as cuBLAS's for a while: pytorch/pytorch#183923.
    NCCL        `computeBuffSizes` in NCCL's `src/init.cc`: 4 MiB for Simple, 4.7 for
                LL128, 0.5 for LL, which the log of NVIDIA/nccl#1685 shows as 10 MiB
                where a channel receives and 2 MiB where it sends. A ring has both on
                each of its channels, trees as much again.

AMD's contexts are not known; its rows take NVIDIA's law for their compute units.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.clusters.machine import Device, Link
from bigmodel.units import MIB

CONTEXT = 3.05 * MIB
"""Bytes of the driver's context for each multiprocessor: the middle of those read."""
CONTEXT_LOW, CONTEXT_HIGH = 2.95 * MIB, 3.15 * MIB
"""The least and the most that were read."""
_KERNELS, _KERNELS_LOW, _KERNELS_HIGH = 160 * MIB, 60 * MIB, 500 * MIB
"""Bytes of what is loaded into it: likely, least, most."""
_AMPERE = 2 * 4096 * 1024 + 8 * 16 * 1024
"""`:4096:2:16:8`: 8,519,680 B."""
_HOPPER = 32 * MIB
_CHANNEL = 12 * MIB
"""Buffers of one channel of a ring: what it receives into and what it sends from."""
_NVLINK = 100e9
"""Bytes per second of a link from which on it is taken for NVLink."""
_FAST_CHANNELS, _SLOW_CHANNELS = (24, 16, 32), (4, 2, 8)
"""Channels of a ring: likely, least, most. 16 in the log of NVIDIA/nccl#1453 (H100), 32
in that of NVIDIA/nccl#1685."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Bytes that are not known exactly."""

    likely: int
    low: int
    high: int
    because: str
    """The formula with its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadRow:
    """What decides on the overheads of a device."""

    multiprocessors: int
    """Of the data sheet; compute units on AMD's."""
    workspace: int = _AMPERE
    """Bytes of a workspace of cuBLAS or hipBLAS."""
    lt_workspace: int = MIB
    """Bytes of one of cuBLASLt or hipBLASLt."""


ROWS = {
    "V100": OverheadRow(multiprocessors=80),
    "T4": OverheadRow(multiprocessors=40),
    "A10": OverheadRow(multiprocessors=72),
    "A100": OverheadRow(multiprocessors=108),
    "A6000": OverheadRow(multiprocessors=84),
    "L4": OverheadRow(multiprocessors=58),
    "L40S": OverheadRow(multiprocessors=142),
    "RTX3090": OverheadRow(multiprocessors=82),
    "RTX4090": OverheadRow(multiprocessors=128),
    "H100": OverheadRow(multiprocessors=132, workspace=_HOPPER),
    "H200": OverheadRow(multiprocessors=132, workspace=_HOPPER),
    # pytorch/pytorch#175344.
    "B200": OverheadRow(multiprocessors=148, workspace=_HOPPER),
    "MI250X": OverheadRow(
        multiprocessors=110, workspace=32 * MIB, lt_workspace=76 * MIB
    ),
    "MI300X": OverheadRow(
        multiprocessors=304, workspace=128 * MIB, lt_workspace=76 * MIB
    ),
}
"""By the device's name, without its memory."""
_STAND_IN = "H100"
"""Whose row serves for devices that have none, and estimates say so."""
THREADS = 2
"""Those that multiply matrices have a handle each: the main one and autograd's."""


def overhead_row(device: Device) -> OverheadRow:
    """Return the row of a device."""
    return ROWS.get(_name(device), ROWS[_STAND_IN])


def context(device: Device) -> Share:
    """Return the bytes of the driver's context with the kernels that are loaded."""
    count = overhead_row(device).multiprocessors
    taken = "" if _name(device) in ROWS else f" (those of {_STAND_IN})"
    return Share(
        likely=int(count * CONTEXT) + _KERNELS,
        low=int(count * CONTEXT_LOW) + _KERNELS_LOW,
        high=int(count * CONTEXT_HIGH) + _KERNELS_HIGH,
        because=f"{count} multiprocessors{taken} x {CONTEXT / MIB:.2f} MiB + "
        f"{_KERNELS // MIB} MiB of kernels, CUDA 12 and 13 with lazy loading",
    )


def communicator(link: Link) -> Share:
    """Return the bytes of one communicator of NCCL.

    Args:
        link: Between the devices of a machine.
    """
    fast = link.bandwidth >= _NVLINK
    likely, least, most = _FAST_CHANNELS if fast else _SLOW_CHANNELS
    return Share(
        likely=likely * _CHANNEL,
        low=least * _CHANNEL,
        # With trees beside the ring.
        high=2 * most * _CHANNEL,
        because=f"{likely} channels x {_CHANNEL // MIB} MiB",
    )


def _name(device: Device) -> str:
    return device.name.split("-")[0]
