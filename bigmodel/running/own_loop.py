"""Forward, backward and step called one by one, in a loop of the user's own."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from bigmodel.backends.engine import AbstractEngine, LossShare
from bigmodel.backends.forward import weigh
from bigmodel.backends.whole_model import AbstractWholeModelEngine
from bigmodel.errors import UsageError
from bigmodel.plans import Plan


@final
class OwnLoop:
    """Counts the micro-batches of an accumulation window.

    Args:
        plan: Says how many there are.
        engine: That of this rank.
        device: Where it computes.
    """

    def __init__(
        self, plan: Plan, engine: AbstractEngine, device: torch.device
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._total = torch.zeros((), device=device)
        self._done = 0

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Return the model's output for one micro-batch."""
        whole = self.whole("forward")
        if self._done == self._plan.accumulation:
            raise UsageError(
                f"the plan accumulates {self._plan.accumulation} micro-batches, and "
                "they have all been given; call engine.step() before the next forward"
            )
        whole.begin(last=self._done == self._plan.accumulation - 1)
        return whole.forward(*positional, **named)

    def backward(self, loss: Tensor, share: LossShare | None) -> None:
        """Add the gradients of one micro-batch's mean loss."""
        whole = self.whole("backward")
        weighted = weigh(loss, 1 / self._plan.accumulation if share is None else share)
        whole.backward(weighted)
        self._total = self._total + weighted.detach()
        self._done += 1

    def close_window(self) -> Tensor:
        """Return the sum of weighted losses, and begin the next window."""
        self.whole("step")
        if self._done != self._plan.accumulation:
            raise UsageError(
                f"engine.step() came after {self._done} of the plan's "
                f"{self._plan.accumulation} micro-batches; call engine.backward(loss) "
                "for each of them first"
            )
        total, self._total = self._total, torch.zeros_like(self._total)
        self._done = 0
        return total

    def whole(self, method: str) -> AbstractWholeModelEngine:
        """Return the engine, for a method that has no meaning with stages.

        Raises:
            UsageError: The plan has stages.
        """
        if isinstance(self._engine, AbstractWholeModelEngine):
            return self._engine
        raise UsageError(
            f"engine.{method}() has no meaning under a plan with pipeline stages "
            f"({self._plan.describe()}): the schedule runs forwards and backwards of "
            "several micro-batches in its own order; give the whole local batch to "
            "engine.step(batch), which works under every plan"
        )
