"""Writing a checkpoint together with all ranks, and reading it under any plan."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.engine import AbstractEngine
from bigmodel.errors import UsageError
from bigmodel.plans import Plan, document
from bigmodel.running.checkpoint_folder import CheckpointFolder


def write_checkpoint(
    folder: CheckpointFolder,
    plan: Plan,
    engine: AbstractEngine,
    own: dict[str, Any],
    progress: dict[str, Any],
) -> None:
    """Write weights, states, and where the run is; collective.

    Args:
        folder: Where.
        plan: The plan.
        engine: Writes weights and optimizer states.
        own: What this rank has for itself.
        progress: What all ranks share; plain values.
    """
    rank = dist.get_rank()
    if rank == 0:
        folder.begin()
    dist.barrier()
    engine.save(folder.state)
    folder.write_rank(rank, own)
    dist.barrier()
    if rank == 0:
        folder.finish(plan, progress)
    dist.barrier()


def read_checkpoint(
    folder: CheckpointFolder, plan: Plan, engine: AbstractEngine
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read weights and states, and return what was written beside them; collective.

    Args:
        folder: Where.
        plan: The plan of this run.
        engine: Reads weights and optimizer states.

    Returns:
        What all ranks share, and what this rank has for itself; under another plan,
        what it takes over of that.

    Raises:
        UsageError: The checkpoint is incomplete, of another model or optimizer, or of
            a plan that does not share.
    """
    written, rank = folder.plan(), dist.get_rank()
    same = document.digest(written) == document.digest(plan)
    if not same:
        _check_shared(written, plan)
    engine.load(folder.state)
    own = folder.rank(rank) if same else _taken_over(folder, written, plan, rank)
    return folder.progress(), own


def _check_shared(written: Plan, plan: Plan) -> None:
    for name in (written.backend, plan.backend):
        if not BACKENDS.get(name).shares_checkpoints:
            raise UsageError(
                f"the checkpoint was written under another plan: {written.describe()}; "
                f"this run's plan is {plan.describe()}; and those of backend {name!r} "
                "can be read under the plan that wrote them only: run with that plan"
            )


def _taken_over(
    folder: CheckpointFolder, written: Plan, plan: Plan, rank: int
) -> dict[str, Any]:
    """Return what a rank of one plan has from the ranks of another."""
    own: dict[str, Any] = {}
    found = folder.rank(rank) if rank < written.world else {}
    if "random" in found:
        own["random"] = found["random"]
    # A stage of frozen layers has no scheduler; those of the others are alike.
    for other in range(written.world):
        if scheduler := folder.rank(other).get("scheduler"):
            own["scheduler"] = scheduler
            break
    own["stream"] = _stream(folder, written, plan, rank)
    return own


def _stream(
    folder: CheckpointFolder, written: Plan, plan: Plan, rank: int
) -> dict[str, Any] | None:
    """Return the place in the stream of this rank's share of the data."""
    if _reads_alike(written, plan):
        before = written.mesh.stage_ranks(0)[plan.mesh.data_rank(rank)]
        return folder.rank(before).get("stream")
    if folder.rank(0).get("stream") is None:
        return None
    return {
        "moved": f"the checkpoint's run read streams of its own on "
        f"{written.mesh.data_parallel} data-parallel ranks, {written.accumulation} "
        f"micro-batches of {written.micro_batch} a step; this plan has "
        f"{plan.mesh.data_parallel}, {plan.accumulation} and {plan.micro_batch}, and "
        "places in streams cannot be dealt out anew: begin them with start=, or give a "
        "dataset, whose place holds under every plan"
    }


def _reads_alike(written: Plan, plan: Plan) -> bool:
    return (
        written.mesh.data_parallel == plan.mesh.data_parallel
        and written.accumulation == plan.accumulation
        and written.micro_batch == plan.micro_batch
    )
