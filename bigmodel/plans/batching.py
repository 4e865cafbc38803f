"""Splitting a global batch into micro-batches."""

from __future__ import annotations

from bigmodel.errors import InvalidPlanError, Violation, raise_if_any
from bigmodel.plans.mesh import Mesh


def accumulation_for(global_batch: int, micro_batch: int, mesh: Mesh) -> int:
    """Return the micro-batches per rank that make up `global_batch` samples.

    Raises:
        InvalidPlanError: A size is not positive, or the batch does not divide.
    """
    raise_if_any(
        [
            Violation(field=name, got=size, rule="it must be at least 1")
            for name, size in (
                ("global_batch", global_batch),
                ("micro_batch", micro_batch),
            )
            if size < 1
        ],
        InvalidPlanError,
    )
    per_micro_step = micro_batch * mesh.data_parallel
    if global_batch % per_micro_step:
        near = max(
            per_micro_step, round(global_batch / per_micro_step) * per_micro_step
        )
        raise InvalidPlanError(
            Violation(
                field="global_batch",
                got=global_batch,
                rule=f"it must be a multiple of micro-batch {micro_batch} x "
                f"{mesh.data_parallel} data-parallel ranks = {per_micro_step}",
                cure=f"use {near}, or another micro-batch",
            )
        )
    return global_batch // per_micro_step


def micro_batches(local_batch: int) -> tuple[int, ...]:
    """Return every micro-batch that divides the samples of one rank, largest first."""
    return tuple(size for size in range(local_batch, 0, -1) if local_batch % size == 0)
