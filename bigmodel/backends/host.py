"""Work and copies that involve the memory of a device's machine, or its disk. Pure."""

from __future__ import annotations

from bigmodel.clusters import Cluster
from bigmodel.models import OPTIMIZERS
from bigmodel.plans import Plan


def copy_seconds(cluster: Cluster, num_bytes: float) -> float:
    """Return the seconds of a copy between a device and pinned host memory."""
    link = cluster.node.host_link
    return link.latency + num_bytes / link.bandwidth


def disk_seconds(cluster: Cluster, num_bytes: float) -> float:
    """Return the seconds of reading or writing while all ranks of a machine do so."""
    node = cluster.node
    return num_bytes * node.count / node.disk_bandwidth


def host_step_seconds(plan: Plan, cluster: Cluster, elements: float) -> float:
    """Return the seconds of an optimizer's step in host memory.

    The processors read and write every tensor of the step from memory; the ranks of a
    machine share its bandwidth, of which they get what elementwise operators get.
    """
    node = cluster.node
    share = node.host_bandwidth * node.device.bandwidth_efficiency / node.count
    return OPTIMIZERS.get(plan.optimizer).passes * elements * 4 / share
