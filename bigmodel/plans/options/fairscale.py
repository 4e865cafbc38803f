"""What a plan says to fairscale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigmodel.errors import Violation
from bigmodel.plans.options.checks import not_negative


@dataclass(frozen=True, slots=True, kw_only=True)
class FairscaleOptions:
    """Names and units are those of fairscale."""

    reduce_buffer_elements: int = 2**23
    """`reduce_buffer_size` of `ShardedDataParallel` (stage 2), in elements; 0 reduces
    every gradient by itself."""
    adascale: bool = False
    """Wrap the optimizer in `AdaScale` (Johnson et al., arXiv 2007.05105): the learning
    rate of one small batch, times a gain that is read off how far the gradients of
    ranks and micro-batches agree. Stage 1."""

    def violations(self) -> Iterator[Violation]:
        """Yield what can never be right."""
        yield from not_negative(
            "fairscale.reduce_buffer_elements", self.reduce_buffer_elements
        )
