"""From tensors to what the driver reports: allocator, workspaces, context, NCCL.

    allocated      tensors, and the workspaces of cuBLAS
    reserved       what the caching allocator takes from the device for them, replayed
    device total   with the context and the communicators; its upper end is what a
                   device must have

Each has an interval. The lower end of reserved bytes is what is needed at least:
nothing cached beyond what is in use, which is what the allocator comes to when the
device is full. The upper end has all that the replay caches. Tensors themselves are
uncertain by what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigmodel.clusters import Cluster
from bigmodel.clusters.overheads import (
    THREADS,
    Share,
    communicator,
    context,
    overhead_row,
)
from bigmodel.plans import Plan
from bigmodel.search.prediction import Interval, Term
from bigmodel.simulator import Replayed
from bigmodel.units import MIB, format_bytes

PROCESS = 350 * MIB
"""Resident memory of a process that has imported torch, measured on Linux."""
TENSORS = 0.02
"""Of the bytes of tensors. Predicted peaks were 1.0 % below to 2.5 % above measured
ones, 95 of 100 within 0.5 % (561 cases,
`benchmarks/results/memory_accuracy_cpu_2_processes.json`)."""
CPU_LOW, CPU_HIGH = 0.97, 1.05
"""Of a process on CPUs, whose memory no allocator of torch accounts for."""


def workspaces(cluster: Cluster) -> tuple[int, ...]:
    """Return the bytes of each workspace, which lies in torch's allocator."""
    if cluster.device.kind == "cpu":
        return ()
    row = overhead_row(cluster.device)
    return (row.workspace, row.lt_workspace) * THREADS


def workspace_terms(cluster: Cluster) -> tuple[Term, ...]:
    """Return the workspaces as terms of what is allocated."""
    if cluster.device.kind == "cpu":
        return ()
    row = overhead_row(cluster.device)
    names = (
        ("cuBLAS workspaces", row.workspace),
        ("cuBLASLt workspaces", row.lt_workspace),
    )
    return tuple(
        Term(
            name=name,
            num_bytes=size * THREADS,
            because=f"{format_bytes(size)} for the thread of the forward and for "
            "autograd's",
        )
        for name, size in names
    )


def cached_term(allocated: int, replayed: Replayed) -> Term:
    """Return what the allocator holds beyond the tensors, as a term of the reserved."""
    rounding = replayed.allocated - allocated
    return Term(
        name="allocator: cached and fragmented",
        num_bytes=max(replayed.reserved - allocated, 0),
        because=f"replayed: {replayed.segments} segments, "
        f"{format_bytes(replayed.largest_hole)} the largest hole, "
        f"{format_bytes(max(rounding, 0))} of rounding",
    )


def outside_terms(plan: Plan, cluster: Cluster) -> tuple[Term, ...]:
    """Return what lies outside torch's allocator."""
    if cluster.device.kind == "cpu":
        return (
            Term(
                name="process",
                num_bytes=PROCESS,
                because="Python and torch, measured after import",
            ),
        )
    shares = _outside(plan, cluster)
    return tuple(
        Term(name=name, num_bytes=share.likely, because=share.because)
        for name, share in shares
    )


def intervals(
    plan: Plan, cluster: Cluster, allocated: int, reserved: int, total: int
) -> tuple[Interval, Interval, Interval]:
    """Return what is likely of allocated, reserved and device total of a rank.

    Args:
        plan: The plan.
        cluster: Where it runs.
        allocated: Peak of what is in use.
        reserved: Peak of what the allocator takes for it.
        total: With what lies outside of the allocator.
    """
    doubt = int(allocated * TENSORS)
    if cluster.device.kind == "cpu":
        process = Interval(
            low=int(total * CPU_LOW), likely=total, high=int(total * CPU_HIGH)
        )
        return _around(allocated, doubt), _around(reserved, doubt), process
    shares = [share for _, share in _outside(plan, cluster)]
    # cuBLASLt's workspaces may be as large as cuBLAS's.
    row = overhead_row(cluster.device)
    more = doubt + THREADS * max(row.workspace - row.lt_workspace, 0)
    least = allocated - doubt
    return (
        Interval(low=least, likely=allocated, high=allocated + more),
        Interval(low=least, likely=reserved, high=reserved + more),
        Interval(
            low=least + sum(share.low for share in shares),
            likely=total,
            high=reserved + more + sum(share.high for share in shares),
        ),
    )


def _around(likely: int, doubt: int) -> Interval:
    return Interval(low=likely - doubt, likely=likely, high=likely + doubt)


def _outside(plan: Plan, cluster: Cluster) -> Sequence[tuple[str, Share]]:
    found = [("CUDA context", context(cluster.device))]
    groups = [axis for axis, size in plan.mesh.axes().items() if size > 1]
    if groups:
        one = communicator(cluster.node.link)
        count = len(groups)
        found.append(
            (
                "NCCL communicators",
                Share(
                    likely=one.likely * count,
                    low=one.low * count,
                    high=one.high * count,
                    because=f"{one.because} for each group: {', '.join(groups)}",
                ),
            )
        )
    return found
