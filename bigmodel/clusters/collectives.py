"""Seconds of collectives by latency and bandwidth.

Ring algorithms over n ranks, B bytes in all (Thakur et al. 2005; NCCL's own
performance notes): all-gather and reduce-scatter (n-1)/n B / bandwidth + (n-1) latency,
all-reduce twice that. A ring that spans machines crosses each network port once, and a
machine with k members uses its k ports at once, so a member sees the lesser of the link
inside and k times the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.clusters.machine import Cluster

# Share of the link that large collectives reach; nccl-tests report 75 to 85 % of the
# NVLink figure on 8 x H100.
_LINK_EFFICIENCY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that run a collective together."""

    size: int
    per_node: int
    """Members in one machine."""
    bandwidth: float
    """Bytes per second that one member sends."""
    latency: float

    def gather(self, num_bytes: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter of B bytes in all."""
        steps = self.size - 1
        if steps == 0:
            return 0.0
        return num_bytes * steps / self.size / self.bandwidth + steps * self.latency

    def reduce(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce of B bytes."""
        return 2 * self.gather(num_bytes)


def group(cluster: Cluster, size: int, stride: int = 1) -> Group:
    """Return the group of `size` ranks that lie `stride` ranks apart."""
    in_node = max(1, min(size, cluster.node.count // stride))
    inside, between = cluster.node.link, cluster.link
    if size * stride <= cluster.node.count:
        bandwidth, latency = inside.bandwidth, inside.latency
    elif in_node == 1:
        bandwidth, latency = between.bandwidth, between.latency
    else:
        bandwidth = min(inside.bandwidth, in_node * between.bandwidth)
        # All but one of in_node steps of a ring stay inside a machine.
        latency = (inside.latency * (in_node - 1) + between.latency) / in_node
    return Group(
        size=size,
        per_node=in_node,
        bandwidth=bandwidth * _LINK_EFFICIENCY,
        latency=latency,
    )


def send_seconds(cluster: Cluster, num_bytes: float, distance: int) -> float:
    """Return the seconds of a message to the rank `distance` ranks away."""
    link = cluster.node.link if distance < cluster.node.count else cluster.link
    return num_bytes / (link.bandwidth * _LINK_EFFICIENCY) + link.latency
