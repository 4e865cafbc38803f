"""Which parameters `fully_shard` gathers together, and which it leaves whole. Pure.

Source: torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`: shards are cut
in dim 0 and padded to the size of the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from bigmodel.backends.walk import Step
from bigmodel.models import Param, Placed
from bigmodel.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """Parameters that are gathered together."""

    label: str
    padded: int
    """Elements of all shards together, each padded in dim 0 to equal size."""
    trained: int
    """The same of trained parameters."""
    gradients: tuple[int, ...]
    """Elements of each of their gradients, which carry no padding."""
    makers: tuple[str, ...]
    """Labels of the units whose backwards make these gradients, one for each."""
    largest: int
    """Elements of the largest parameter."""
    sizes: tuple[int, ...]
    """Elements of all shards of each parameter."""
    trained_sizes: tuple[int, ...]
    """The same of trained parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """All parameters of a rank, once."""

    root: ShardGroup
    blocks: tuple[ShardGroup | None, ...]
    """The group of every unit on the rank; None where the unit has none of its own."""
    whole: tuple[Param, ...]
    """Parameters that the plan leaves out of sharding."""
    stepped: tuple[int, ...]
    """Elements of what the fullest rank trains of every parameter, in their order."""

    @property
    def groups(self) -> tuple[ShardGroup, ...]:
        """All groups, the root first."""
        return (self.root, *(group for group in self.blocks if group))


def partition(plan: Plan, steps: Iterable[Step]) -> Partition:
    """Deal the parameters of a rank's units to groups."""
    ranks, paths = plan.mesh.shard, plan.fsdp2.ignored
    outside: list[tuple[str, Param]] = []
    whole: list[Param] = []
    blocks: list[ShardGroup | None] = []
    stepped: list[int] = []
    for step in steps:
        inside: list[tuple[str, Param]] = []
        for param in step.owned:
            ignored = is_ignored(full_name(step.placed, param.name), paths)
            if ignored:
                whole.append(param)
            else:
                inside.append((step.label, param))
            if param.trainable:
                stepped.append(param.elements if ignored else _shard(param, ranks))
        if step.placed.role != "block":
            outside += inside
            inside = []
        blocks.append(_group(step.label, inside, ranks) if inside else None)
    return Partition(
        root=_group("(root)", outside, ranks),
        blocks=tuple(blocks),
        whole=tuple(whole),
        stepped=tuple(stepped),
    )


def full_name(placed: Placed, name: str) -> str:
    """Return the path in the model of a parameter of a unit."""
    return f"{placed.path}.{name}" if placed.path else name


def is_ignored(name: str, paths: tuple[str, ...]) -> bool:
    """Say whether a parameter lies below one of the module paths."""
    return name.startswith(tuple(f"{path}." for path in paths))


def _group(label: str, params: Iterable[tuple[str, Param]], ranks: int) -> ShardGroup:
    sizes: dict[bool, list[int]] = {True: [], False: []}
    gradients: list[int] = []
    makers: list[str] = []
    largest = 0
    for maker, param in params:
        sizes[param.trainable].append(_shard(param, ranks) * ranks)
        if param.trainable:
            gradients.append(param.elements)
            makers.append(maker)
        largest = max(largest, param.elements)
    return ShardGroup(
        label=label,
        padded=sum(sizes[True]) + sum(sizes[False]),
        trained=sum(sizes[True]),
        gradients=tuple(gradients),
        makers=tuple(makers),
        largest=largest,
        sizes=(*sizes[True], *sizes[False]),
        trained_sizes=tuple(sizes[True]),
    )


def _shard(param: Param, ranks: int) -> int:
    """Return the elements of the largest shard, and with padding of every one."""
    rows = param.shape[0] if param.shape else 1
    return ceil(rows / ranks) * (param.elements // max(rows, 1))
