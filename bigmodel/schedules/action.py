"""One piece of pipeline work, spelled as torch spells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["F", "B", "I", "W"]
"""Forward; backward; or backward in two parts: gradients of inputs, then of weights."""


@dataclass(frozen=True, slots=True)
class Action:
    """A stage does one phase of one micro-batch; prints as `0F3`."""

    stage: int
    phase: Phase
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.micro_batch}"


Rows = tuple[tuple[Action, ...], ...]
"""For every rank, its actions in the order in which it does them."""
