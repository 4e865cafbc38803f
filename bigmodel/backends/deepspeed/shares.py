"""How ZeRO 3 cuts parameters into shards: each by itself, padded to equal ones.

Source: deepspeed 0.19, `runtime/zero/{partition_parameters,stage3}.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from bigmodel.backends.walk import Step
from bigmodel.models import Param
from bigmodel.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Elements of shards on one rank."""

    weights: int
    trained: int
    largest: int
    """Of one trained parameter."""
    groups: tuple[int, ...]
    """Trained ones by the optimizer's sub-groups."""
    shards: tuple[int, ...]
    """Of parameters that no rank holds whole, one by one."""
    persistent: tuple[int, ...]
    """Of parameters that every rank holds whole, all shards of one together."""


def shares_of(plan: Plan, steps: Sequence[Step]) -> Shares:
    """Return the shards that a rank holds of these units."""
    ranks, options = plan.mesh.shard, plan.deepspeed
    threshold = options.param_persistence_threshold
    owned = [param for step in steps for param in step.owned]
    trained = [padded(p, ranks) // ranks for p in owned if p.trainable]
    return Shares(
        weights=sum(padded(p, ranks) // ranks for p in owned),
        trained=sum(trained),
        largest=max(trained, default=0),
        groups=tuple(_sub_groups(trained, options.sub_group_size)),
        shards=tuple(
            padded(p, ranks) // ranks for p in owned if p.elements > threshold
        ),
        persistent=tuple(padded(p, ranks) for p in owned if p.elements <= threshold),
    )


def _sub_groups(shares: list[int], size: int) -> list[int]:
    """Return the elements of the sub-groups, each closed when it is large enough."""
    groups = [0]
    for share in shares:
        if groups[-1] >= size:
            groups.append(0)
        groups[-1] += share
    return groups


def padded(param: Param, ranks: int) -> int:
    """Return the elements of all shards of a parameter."""
    return ceil(param.elements / ranks) * ranks
