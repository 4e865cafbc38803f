"""The micro-batches of one optimizer step on one rank, where they are not alike.

A plain batch is split into equal micro-batches. A window says them one by one: they may
have different numbers of samples, and some may be there only because all ranks must run
equally many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from bigmodel.backends.engine import Batch
from bigmodel.errors import UsageError, Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What `Engine.batches` yields where micro-batches differ; given to `Engine.step`.

    All ranks give a window to the same step, because they then tell each other how much
    theirs weigh.
    """

    micro_batches: tuple[Batch, ...]
    """As many as the plan accumulates."""
    real: tuple[bool, ...]
    """Whether each counts; the others weigh nothing."""

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches that count."""
        pairs = zip(self.micro_batches, self.real, strict=True)
        return [batch for batch, real in pairs if real]


def check_samples(count: int, expected: int, what: str) -> None:
    """Make sure that a batch is what the plan expects of this rank.

    Raises:
        UsageError: It has another size.
    """
    if count != expected:
        raise UsageError(
            Violation(
                field=f"{what} in the batch",
                got=count,
                rule=f"every data-parallel rank gives {expected} a step",
                cure="take the batches from engine.batches(source)",
            )
        )


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Cut a batch into parts of these numbers of samples."""
    leaves, structure = pytree.tree_flatten(batch)
    pieces = [
        leaf.split(list(sizes)) if isinstance(leaf, Tensor) else (leaf,) * len(sizes)
        for leaf in leaves
    ]
    return [
        pytree.tree_unflatten([piece[index] for piece in pieces], structure)
        for index in range(len(sizes))
    ]


def on_cpu(batch: Batch) -> Any:
    """Return a copy of a batch on the CPU."""
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf.detach().to("cpu", copy=True), batch
    )
