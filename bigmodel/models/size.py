"""Sizes that grow with the micro-batch by an affine law."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """`fixed + per_sample * micro_batch`, in bytes or FLOP."""

    fixed: int
    """The part that does not depend on the micro-batch."""
    per_sample: int
    """What every sample of the micro-batch adds."""

    def at(self, micro_batch: int) -> int:
        """Return the size for a micro-batch of this many samples."""
        return self.fixed + self.per_sample * micro_batch
