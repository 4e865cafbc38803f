"""The table of devices: one row each, with its data sheet.

Peaks are dense, without sparsity. Memory is what `nvidia-smi` prints as total where it
is known, otherwise the data sheet's figure. Link and network figures are those of the
vendor's own machines with this device.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.clusters.machine import Device, Link
from bigmodel.registry import Registry
from bigmodel.units import GB, MIB

NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions"
AMD = "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs"
TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """A device with the links of the machines that it is sold in."""

    device: Device
    link: Link
    """To the other devices of the machine."""
    network: Link
    """To other machines, per device."""


DEVICES: Registry[DeviceRow] = Registry("device")

_PCIE3 = Link(bandwidth=12e9, latency=10e-6)
_PCIE4 = Link(bandwidth=24e9, latency=10e-6)
_ETHERNET_25G = Link(bandwidth=3e9, latency=30e-6)
_INFINIBAND_100G = Link(bandwidth=12.5e9, latency=10e-6)
_INFINIBAND_200G = Link(bandwidth=25e9, latency=10e-6)
_INFINIBAND_400G = Link(bandwidth=50e9, latency=10e-6)


def _nvlink(bandwidth: float) -> Link:
    return Link(bandwidth=bandwidth, latency=8e-6)


def _add(
    name: str,
    memory: int,
    bandwidth: float,
    half: float,
    single: float,
    source: str,
    *,
    link: Link,
    network: Link,
    bfloat16: bool = True,
) -> None:
    peaks = {"float32": single * TERA, "float16": half * TERA}
    if bfloat16:
        peaks["bfloat16"] = half * TERA
    device = Device(
        name=name, memory=memory, bandwidth=bandwidth, peaks=peaks, source=source
    )
    DEVICES.add(name, DeviceRow(device=device, link=link, network=network))


_add(
    "V100-16GB", 16_160 * MIB, 900e9, 125, 15.7,
    "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
    link=_nvlink(150e9), network=_INFINIBAND_100G, bfloat16=False,
)  # fmt: skip
_add(
    "V100-32GB", 32_510 * MIB, 900e9, 125, 15.7,
    "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
    link=_nvlink(150e9), network=_INFINIBAND_100G, bfloat16=False,
)  # fmt: skip
_add(
    "T4-16GB", 15_360 * MIB, 320e9, 65, 8.1,
    f"{NVIDIA}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
    link=_PCIE3, network=_ETHERNET_25G, bfloat16=False,
)  # fmt: skip
_add(
    "A10-24GB", 23_028 * MIB, 600e9, 125, 31.2,
    f"{NVIDIA}/Data-Center/a10/pdf/a10-datasheet.pdf",
    link=_PCIE4, network=_ETHERNET_25G,
)  # fmt: skip
_add(
    "A100-40GB", 40_960 * MIB, 1555e9, 312, 19.5,
    f"{NVIDIA}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    link=_nvlink(300e9), network=_INFINIBAND_200G,
)  # fmt: skip
_add(
    "A100-80GB", 81_920 * MIB, 2039e9, 312, 19.5,
    f"{NVIDIA}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    link=_nvlink(300e9), network=_INFINIBAND_200G,
)  # fmt: skip
_add(
    "A6000-48GB", 49_140 * MIB, 768e9, 154.8, 38.7,
    f"{NVIDIA}/design-visualization/quadro-product-literature/proviz-print-nvidia-rtx-a6000-datasheet-us-nvidia-1454980-r9-web%20(1).pdf",
    link=_PCIE4, network=_ETHERNET_25G,
)  # fmt: skip
_add(
    "L4-24GB", 23_034 * MIB, 300e9, 121, 30.3,
    "https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet",
    link=_PCIE4, network=_ETHERNET_25G,
)  # fmt: skip
_add(
    "L40S-48GB", 46_068 * MIB, 864e9, 362, 91.6,
    "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
    link=_PCIE4, network=_INFINIBAND_100G,
)  # fmt: skip
_add(
    "RTX3090-24GB", 24_576 * MIB, 936e9, 71, 35.6,
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf",
    link=_PCIE4, network=_ETHERNET_25G,
)  # fmt: skip
_add(
    "RTX4090-24GB", 24_564 * MIB, 1008e9, 165.2, 82.6,
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    link=_PCIE4, network=_ETHERNET_25G,
)  # fmt: skip
_add(
    "H100-80GB", 81_559 * MIB, 3350e9, 989, 67,
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
    link=_nvlink(450e9), network=_INFINIBAND_400G,
)  # fmt: skip
_add(
    "H200-141GB", 143_771 * MIB, 4800e9, 989, 67,
    "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446",
    link=_nvlink(450e9), network=_INFINIBAND_400G,
)  # fmt: skip
_add(
    "B200-180GB", 183_359 * MIB, 7700e9, 2250, 75,
    "https://resources.nvidia.com/en-us-blackwell-architecture/datasheet",
    link=_nvlink(900e9), network=_INFINIBAND_400G,
)  # fmt: skip
_add(
    "MI250X-128GB", 128 * 1024 * MIB, 3277e9, 383, 47.9,
    f"{AMD}/product-briefs/instinct-mi250x-brochure.pdf",
    link=Link(bandwidth=100e9, latency=10e-6), network=_INFINIBAND_200G,
)  # fmt: skip
_add(
    "MI300X-192GB", 192 * GB, 5300e9, 1307, 163.4,
    f"{AMD}/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
    link=Link(bandwidth=448e9, latency=10e-6), network=_INFINIBAND_400G,
)  # fmt: skip
