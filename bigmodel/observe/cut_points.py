"""Where a model can be cut into pipeline stages, read off the graph of its forward.

A stage is given what the block before it returned, one tensor, and the batch. It can do
with that if nothing trained that went into this tensor is used again later, but through
it. Weights with two names are tied: every stage that uses one has its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigmodel.observe.graph_leaves import leaves_of


class HandedOver:
    """Keeps what every block returns; only for a forward that measures no memory.

    Args:
        blocks: In forward order.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.outputs: list[list[Tensor]] = [[] for _ in blocks]
        self._handles = [
            block.register_forward_hook(self._hook(index))
            for index, block in enumerate(blocks)
        ]

    def close(self) -> None:
        """Remove the hooks and let go of the tensors."""
        for handle in self._handles:
            handle.remove()
        self.outputs = []

    def _hook(self, index: int) -> Callable[..., None]:
        def keep(_: nn.Module, args: Any, output: Any) -> None:
            leaves = tree_leaves(output)
            self.outputs[index] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        return keep


def find_cut_points(
    loss: Tensor, outputs: Sequence[Sequence[Tensor]], model: nn.Module
) -> tuple[tuple[int, ...], str]:
    """Return the blocks before which a stage can begin, and why not before others.

    Args:
        loss: With its graph.
        outputs: What every block returned.
        model: Whose blocks they are.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    single = {key for key, several in names.items() if len(several) == 1}
    points: list[int] = []
    reasons: list[str] = []
    cache: dict[int, str] = {}
    for index, handed in enumerate(outputs[:-1]):
        if len(handed) != 1:
            reasons.append(
                f"its blocks hand each other {len(handed)} tensors, and a stage hands "
                "on one"
            )
            continue
        # Blocks that stand for others hand on what they were given.
        key = id(handed[0])
        if key not in cache:
            cache[key] = _used_again(loss, handed[0], single, names)
        if cache[key]:
            reasons.append(cache[key])
        else:
            points.append(index + 1)
    return tuple(points), reasons[0] if reasons else ""


def _used_again(
    loss: Tensor, hidden: Tensor, single: set[int], names: dict[int, list[str]]
) -> str:
    """Say which weight goes into both sides of a cut; an empty string: none."""
    both = leaves_of(loss, [hidden]) & leaves_of(hidden) & single
    first = next((several[0] for key, several in names.items() if key in both), "")
    return first and f"{first} goes into what follows past the hidden states too"
