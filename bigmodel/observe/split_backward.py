"""The backward in two parts, as torch runs it under schedules without bubbles.

    inputs    from the loss to the first block, last unit first; what arrives at every
              operator with weights is kept
    weights   from there to the gradients of the weights, first unit first

The graph begins at the input of the first block: a stage that splits its backward
receives that. torch frees the graph above the outermost operator with weights at the
end of the first part, and what no gradient of a weight needs with the last of them.

Source: torch 2.13, `torch/distributed/pipelining/_backward.py`, whose functions are
called here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from bigmodel.observe.boundaries import UnitBoundaries
from bigmodel.observe.layout import Layout
from bigmodel.observe.storages import StorageFollower

POLICY = "split"
"""Key of a unit's phases under which the two parts are."""


class GraphStart:
    """Makes the graph begin at what enters a block.

    Args:
        block: The first block; hook it before anything else does.
    """

    def __init__(self, block: nn.Module) -> None:
        self.inputs: list[Tensor] = []
        self._handle = block.register_forward_pre_hook(self._enter, with_kwargs=True)

    def close(self) -> None:
        """Remove the hook and let go of the inputs."""
        self._handle.remove()
        self.inputs = []

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves: dict[int, Tensor] = {}
        floats = [t for t in tree_leaves((args, kwargs)) if _is_float(t)]
        # Between stages all that is trained before requires a gradient; at the very
        # beginning perhaps nothing does.
        chosen = [t for t in floats if t.requires_grad] or floats[:1]

        def detached(tensor: Tensor) -> Tensor:
            if not any(tensor is other for other in chosen):
                return tensor
            key = id(tensor)
            if key not in leaves:
                leaves[key] = tensor.detach().requires_grad_()
            return leaves[key]

        entered = tree_map_only(Tensor, detached, (args, kwargs))
        self.inputs = list(leaves.values())
        return entered


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def parameter_units(
    model: nn.Module, layout: Layout
) -> dict[str, tuple[nn.Parameter, int]]:
    """Return every trained parameter with its unit; outside the blocks the last one.

    Those before the blocks are in no graph that begins after them.
    """
    units = {
        path: layout.unit_of_block(index) for index, path in enumerate(layout.paths)
    }
    found: dict[str, tuple[nn.Parameter, int]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inside = (u for path, u in units.items() if name.startswith(path + "."))
            found[name] = parameter, next(inside, layout.count - 1)
    return found


def run_split_backward(
    loss: Tensor,
    start: GraphStart,
    params: Mapping[str, tuple[nn.Parameter, int]],
    follower: StorageFollower,
    boundaries: UnitBoundaries,
) -> None:
    """Run both parts and tell the follower where it is.

    Args:
        loss: Its graph is used up.
        start: Where the graph begins.
        params: Trained parameters and their units, by name.
        follower: At the backward of the last unit.
        boundaries: Leads it through the first part.
    """
    weights = [parameter for parameter, _ in params.values()]
    _, groups = stage_backward_input([loss], None, start.inputs, iter(weights))
    boundaries.ignore_gradients()
    names = {id(parameter): name for name, (parameter, _) in params.items()}

    order = {name: place for place, name in enumerate(params)}
    for group in groups:
        # torch has a set here, whose order changes from run to run.
        group["params"] = sorted(
            group["params"], key=lambda node: order[names[id(node.variable)]]
        )

    def unit_of(group: dict[str, Any]) -> int:
        return min(params[names[id(node.variable)]][1] for node in group["params"])

    # A stage lists its parameters in order; a tied head comes last, and not with the
    # embedding that it shares its weight with.
    for group in sorted(groups, key=unit_of):
        owned = [node.variable for node in group["params"]]
        follower.enter((unit_of(group), "weights"))
        stage_backward_weight(iter(owned), [group])
        for parameter in owned:
            follower.gradient_ready(names[id(parameter)], parameter)
