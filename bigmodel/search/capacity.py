"""From allocated bytes to what the driver reports: allocator, context, communicators.

These are figures read elsewhere, with an interval; a model of the caching allocator is
to replace the first one.
"""

from __future__ import annotations

from bigmodel.clusters import Cluster
from bigmodel.plans import Plan
from bigmodel.search.prediction import Term
from bigmodel.units import GIB, MIB

FRAGMENTATION = 0.08
"""Of the bytes that come and go in a step. Reserved over allocated was seen at 1.06 to
1.10 (SimuMax's constant; Mist, EuroSys 2025)."""
CUDA_CONTEXT = int(0.55 * GIB)
"""CUDA 12 with lazy loading: 0.3 GiB, and the kernels that a training step loads."""
COMMUNICATOR = int(0.3 * GIB)
"""NCCL buffers of one communicator: hundreds of MB (NVIDIA/nccl#964)."""
CUBLAS_WORKSPACE = 32 * MIB
"""`:4096:2:16:8` on Hopper; 8 MiB before. Inside the caching allocator."""
PROCESS = 350 * MIB
"""Resident memory of a process that has imported torch, measured on Linux."""

LOW, HIGH = 0.97, 1.05
"""The interval around the device total that is taken for likely."""


def reserved_terms(cluster: Cluster, moving: int) -> tuple[Term, ...]:
    """Return what the allocator holds beyond the tensors.

    Args:
        cluster: CPU devices have no caching allocator.
        moving: Bytes at the peak that are not live through the whole step.
    """
    if cluster.device.kind == "cpu":
        return ()
    return (
        Term(
            name="allocator fragmentation",
            num_bytes=int(FRAGMENTATION * moving),
            because=f"{FRAGMENTATION:.0%} of what comes and goes in a step",
        ),
        Term(
            name="cuBLAS workspace",
            num_bytes=CUBLAS_WORKSPACE,
            because="one handle and stream, 32 MiB",
        ),
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
    terms = [
        Term(
            name="CUDA context",
            num_bytes=CUDA_CONTEXT,
            because="context and kernels, CUDA 12 with lazy loading",
        )
    ]
    groups = [axis for axis, size in plan.mesh.axes().items() if size > 1]
    if groups:
        terms.append(
            Term(
                name="NCCL communicators",
                num_bytes=COMMUNICATOR * len(groups),
                because=f"0.3 GiB for each group: {', '.join(groups)}",
            )
        )
    return tuple(terms)
