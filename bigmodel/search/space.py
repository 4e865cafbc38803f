"""Every plan for a model on a cluster that makes up a global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bigmodel.backends.catalog import BACKENDS
from bigmodel.plans import Plan, Precision, RecomputePolicy, micro_batches
from bigmodel.simulator import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user fixed."""

    global_batch: int
    optimizer: str
    precision: Precision
    backends: tuple[str, ...]


def enumerate_plans(costs: Costs, request: Request) -> Iterator[Plan]:
    """Yield every plan: backend x layout x micro-batch x recomputation."""
    for name in request.backends:
        for layout in BACKENDS.get(name).layouts(costs):
            ranks = layout.mesh.data_parallel
            if request.global_batch % ranks:
                continue
            local = request.global_batch // ranks
            for micro_batch in micro_batches(local):
                for recompute in _policies(len(layout.units)):
                    yield replace(
                        layout,
                        micro_batch=micro_batch,
                        accumulation=local // micro_batch,
                        precision=request.precision,
                        optimizer=request.optimizer,
                        recompute=recompute,
                    )


def _policies(count: int) -> Sequence[tuple[RecomputePolicy, ...]]:
    nothing: tuple[RecomputePolicy, ...] = ()
    everything: tuple[RecomputePolicy, ...] = ("full",) * count
    return [nothing, everything] if count else [nothing]
