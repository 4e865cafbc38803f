"""Devices, links, nodes and clusters as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bigmodel.errors import InvalidClusterError, Violation, raise_if_any
from bigmodel.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or the cores and memory that one process is given."""

    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    memory: int
    """Bytes that the driver reports, not the round number of the product name."""
    bandwidth: float
    """Bytes per second between memory and compute, as the data sheet says."""
    peaks: Mapping[str, float]
    """Dense FLOP per second by element type; what is missing is not supported."""
    source: str
    """Where these figures were read."""
    efficiency: float = 0.7
    """Share of the peak that large matrix products reach."""
    bandwidth_efficiency: float = 0.8
    """Share of the bandwidth that elementwise operators reach."""
    launch_seconds: float = 6e-6
    """Least time of one operator."""

    def __post_init__(self) -> None:
        raise_if_any(
            [
                Violation(field=f"{self.name}.{name}", got=value, rule="not positive")
                for name, value in (
                    ("memory", self.memory),
                    ("bandwidth", self.bandwidth),
                    *self.peaks.items(),
                )
                if not value > 0
            ],
            InvalidClusterError,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection, as one device sees it."""

    bandwidth: float
    """Bytes per second and direction that one device can send."""
    latency: float
    """Seconds that one message takes however short it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine."""

    device: Device
    count: int
    """Devices in the machine."""
    link: Link
    """Between the devices of the machine."""
    host_memory: int = 0
    """Bytes of host memory; 0: unknown."""
    host_link: Link = field(default_factory=lambda: Link(bandwidth=24e9, latency=10e-6))
    """Between a device and host memory, as one device sees it; PCIe 4.0 x16 unless it
    is known."""
    host_bandwidth: float = 200e9
    """Bytes per second of host memory, for all processors together; one socket with
    8 channels of DDR4-3200 has 204.8e9."""
    disk_bandwidth: float = 5e9
    """Bytes per second of the machine's local disks, for all processes together; one
    drive on PCIe 4.0 x4 reads 7e9 and writes 5e9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal machines joined by a network."""

    name: str
    node: Node
    num_nodes: int = 1
    link: Link = field(default_factory=lambda: Link(bandwidth=25e9, latency=10e-6))
    """Between machines, as one device sees it."""

    def __post_init__(self) -> None:
        raise_if_any(
            [
                Violation(
                    field=f"cluster {name}",
                    got=count,
                    rule="it must be a whole number of at least 1",
                )
                for name, count in (
                    ("nodes", self.num_nodes),
                    ("devices in a node", self.node.count),
                )
                if count < 1
            ],
            InvalidClusterError,
        )

    @property
    def device(self) -> Device:
        """The device that every rank runs on."""
        return self.node.device

    @property
    def world(self) -> int:
        """Number of devices."""
        return self.num_nodes * self.node.count

    def describe(self) -> str:
        """Say the cluster in one line."""
        nodes = f"{self.num_nodes} nodes x " if self.num_nodes > 1 else ""
        memory = format_bytes(self.device.memory)
        return f"{nodes}{self.node.count} x {self.device.name} ({memory} each)"
