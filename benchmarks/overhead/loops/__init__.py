"""The loops that people write by hand, one for each library: a file for each kind.

They do what the engine does for the same plan: accumulate, clip by the global norm,
step AdamW, drop the gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.overhead.loops import (
    deepspeed_zero,
    one_process,
    optimizer_shards,
    replicas,
    stages,
    weight_shards,
)
from benchmarks.overhead.loops.loop import Loop
from bigmodel.plans import Plan

LOOPS: dict[str, Callable[[Plan], Loop]] = {
    "ddp": replicas.ddp,
    "horovod": replicas.horovod,
    "fsdp2": weight_shards.fsdp2,
    "fairscale": optimizer_shards.fairscale,
    "deepspeed": deepspeed_zero.deepspeed,
    "pipeline": stages.pipeline,
    "deepspeed_pipeline": stages.deepspeed_pipeline,
    "naive": one_process.naive,
    "dataparallel": one_process.dataparallel,
    "fairscale_pipe": one_process.fairscale_pipe,
}
"""From a plan's backend to its loop over several processes, or over one's devices."""


def make_loop(plan: Plan) -> Loop:
    """Return the loop that one would write instead of obeying the plan."""
    if plan.num_devices == 1:
        return one_process.plain(plan)
    return LOOPS[plan.backend](plan)
