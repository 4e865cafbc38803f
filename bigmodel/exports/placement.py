"""On how many machines, and how many processes on each, a plan's ranks run."""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.errors import UsageError, Violation, raise_if_any
from bigmodel.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Machines with equally many processes."""

    nodes: int
    per_node: int
    """Processes of each machine; one GPU each."""
    origins: tuple[str, ...]
    """Where each number comes from, in words."""


def place(plan: Plan, nodes: int | None, per_node: int | None) -> Placement:
    """Return where the ranks of a plan run.

    Args:
        plan: Its world is the number of processes.
        nodes: Machines; None: as many as `per_node` needs, or one.
        per_node: Processes of each machine; None: the world divided by `nodes`.

    Raises:
        UsageError: The numbers do not multiply to the plan's world.
    """
    world = plan.world
    raise_if_any(
        [
            Violation(
                field=option, got=count, rule="it must be a whole number of at least 1"
            )
            for option, count in (("--nodes", nodes), ("--gpus-per-node", per_node))
            if count is not None and count < 1
        ],
        UsageError,
    )
    given = "given on the command line"
    if nodes is not None and per_node is not None:
        if nodes * per_node != world:
            raise UsageError(
                Violation(
                    field="--nodes x --gpus-per-node",
                    got=f"{nodes} x {per_node} = {nodes * per_node}",
                    rule=f"the plan is for {world} processes ({plan.describe()})",
                    cure=f"choose two numbers whose product is {world}, or plan again",
                )
            )
        return _placed(nodes, per_node, given, given)
    if per_node is not None:
        _divides("--gpus-per-node", per_node, plan)
        from_world = f"the plan's {world} processes / {per_node}"
        return _placed(world // per_node, per_node, from_world, given)
    if nodes is not None:
        _divides("--nodes", nodes, plan)
        from_world = f"the plan's {world} processes / {nodes}"
        return _placed(nodes, world // nodes, given, from_world)
    return _placed(1, world, "default", f"the plan's {world} processes")


def _divides(option: str, count: int, plan: Plan) -> None:
    if plan.world % count:
        raise UsageError(
            Violation(
                field=option,
                got=count,
                rule=f"it must divide the plan's {plan.world} processes "
                f"({plan.describe()})",
                cure="machines run equally many processes; plan again for others",
            )
        )


def _placed(nodes: int, per_node: int, *origins: str) -> Placement:
    names = (f"nodes {nodes}", f"processes per node {per_node}")
    return Placement(
        nodes=nodes,
        per_node=per_node,
        origins=tuple(
            f"{name} ({origin})" for name, origin in zip(names, origins, strict=True)
        ),
    )
