"""Dynamic loss scaling for float16, with one decision on all ranks.

torch's GradScaler looks at the gradients of one process. Under shards and stages every
process has others, and all must skip a step or none. Growth and back-off are
GradScaler's: double after 2,000 good steps, halve after a bad one, from 2**16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bigmodel.errors import UsageError

START = 2.0**16
GROWTH_INTERVAL = 2000
LOWEST = 1.0


@final
class LossScale:
    """The factor that losses are multiplied with before backward.

    Args:
        enabled: Without it the factor is 1 and no step is ever skipped.
        start: First factor.
    """

    def __init__(self, *, enabled: bool, start: float = START) -> None:
        self.enabled = enabled
        self.factor = start if enabled else 1.0
        """The present factor."""
        self._good_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor."""
        return loss * self.factor if self.enabled else loss

    @torch.no_grad()
    def unscale(self, params: Mapping[str, Tensor]) -> bool:
        """Divide gradients by the factor, and say whether all are finite everywhere.

        Collective: all ranks get the same answer, and the factor follows it.

        Args:
            params: The trained parameters of this rank, by name.

        Raises:
            UsageError: A gradient is not finite although the factor is at its lowest.
        """
        if not self.enabled:
            return True
        bad = self._first_not_finite(params)
        if self._anywhere(bad is not None, params):
            self._good_steps = 0
            if self.factor <= LOWEST:
                raise UsageError(_overflow(self._first_name(bad)))
            self.factor = max(self.factor / 2, LOWEST)
            return False
        self._good_steps += 1
        if self._good_steps >= GROWTH_INTERVAL:
            self.factor *= 2
            self._good_steps = 0
        return True

    def state(self) -> dict[str, float]:
        """Return what a checkpoint must hold."""
        return {"factor": self.factor, "good_steps": float(self._good_steps)}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` returned."""
        if self.enabled:
            self.factor = state["factor"]
            self._good_steps = int(state["good_steps"])

    def _first_not_finite(self, params: Mapping[str, Tensor]) -> str | None:
        named = {
            name: _local(value.grad)
            for name, value in params.items()
            # A shard may be empty, where there are more ranks than rows.
            if value.grad is not None and _local(value.grad).numel()
        }
        if not named:
            return None
        # In fp32: 1 / 2**16 is denormal in float16.
        for gradient in named.values():
            gradient.mul_(1 / self.factor)
        # Gradients of one process may be on several devices.
        device = next(iter(named.values())).device
        # A norm, because isfinite would make tensors of the gradient's size.
        finite = torch.stack(
            [
                torch.linalg.vector_norm(g, math.inf).isfinite().to(device)
                for g in named.values()
            ]
        )
        if finite.all():
            return None
        return next(
            name for name, good in zip(named, finite.tolist(), strict=True) if not good
        )

    def _anywhere(self, here: bool, params: Mapping[str, Tensor]) -> bool:
        if not dist.is_initialized():
            return here
        device = next((p.device for p in params.values()), torch.device("cpu"))
        flag = torch.tensor(float(here), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _first_name(self, here: str | None) -> str:
        names: list[str | None] = [here]
        ranks = 1
        if dist.is_initialized():
            ranks = dist.get_world_size()
            names = [None] * ranks
            dist.all_gather_object(names, here)
        rank = next(rank for rank in range(ranks) if names[rank] is not None)
        return f"{names[rank]!r} on rank {rank}"


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _overflow(where: str) -> str:
    return (
        f"gradients are not finite although the loss is no longer scaled; the first is "
        f"that of {where}; float16 holds no number beyond 65,504: use precision bf16, "
        "a lower learning rate, or look for what overflows in this layer"
    )
