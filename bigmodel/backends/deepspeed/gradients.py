"""Gradients that some rank lacks, or that are not finite, under ZeRO."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.backends.optimizers import trainable
from bigmodel.errors import UsageError
from bigmodel.observe.graph_leaves import leaves_of
from bigmodel.plans import Plan


@final
class MissingGradients:
    """Keeps ranks from reducing different lists of gradients.

    DeepSpeed reduces what there is: where a rank lacks a gradient that others have, its
    bucket has another size, and the collective aborts or never ends.

    With `find_unused` all gradients are reduced after the last micro-batch
    (`coalesce_grad_reduction`), those that a rank lacks as zeros. Without it, the first
    step is checked, so that a user learns of the option.

    Args:
        engine: DeepSpeed's.
        model: The user's, already sharded.
        plan: Says whether gradients are filled.
    """

    def __init__(self, engine: Any, model: nn.Module, plan: Plan) -> None:
        self.fills = plan.deepspeed.find_unused
        """Whether zeros are reduced where a rank has no gradient."""
        self._engine = engine
        self._params = trainable(model)
        self._to_check = plan.accumulation
        self._window: AbstractContextManager[Any] | None = None

    def begin(self) -> None:
        """Open the window of a step at its first micro-batch."""
        if self.fills and self._window is None:
            window = self._engine.coalesce_grad_reduction()
            window.__enter__()
            self._window = window

    def check(self, loss: Tensor) -> None:
        """Compare, in the first step, what the loss of each rank depends on.

        Raises:
            UsageError: The ranks use different parameters; names them.
        """
        if self.fills or not self._to_check:
            return
        self._to_check -= 1
        reached = leaves_of(loss)
        used = [id(param) in reached for param in self._params.values()]
        everyone: list[list[bool]] = [used] * dist.get_world_size()
        dist.all_gather_object(everyone, used)
        names = [
            name
            for index, name in enumerate(self._params)
            if len({found[index] for found in everyone}) > 1
        ]
        if names:
            raise UsageError(
                f"{len(names)} parameters are used by some ranks only: "
                f"{', '.join(names)}; under ZeRO the ranks would reduce different "
                "gradients: plan with DeepSpeedOptions(find_unused=True), which counts "
                "a missing gradient as zero"
            )

    def end(self) -> None:
        """Reduce the gradients of the window."""
        if self._window is None:
            return
        window, self._window = self._window, None
        self._fill()
        window.__exit__(None, None, None)

    def _fill(self) -> None:
        params = list(self._params.values())
        lacks = [param.grad is None for param in params]
        absent = torch.tensor(lacks, dtype=torch.int32, device=params[0].device)
        dist.all_reduce(absent)
        some = (absent < dist.get_world_size()).tolist()
        for param, missing, used in zip(params, lacks, some, strict=True):
            if missing and used:
                param.grad = torch.zeros_like(param)


def overflow_error(model: nn.Module) -> UsageError:
    """Return what to say when gradients overflow although the scale is at its lowest.

    Collective: all ranks look at the same gradients together.
    """
    from deepspeed.utils import safe_get_full_grad

    names = []
    for name, param in trainable(model).items():
        gradient = safe_get_full_grad(param)
        if gradient is not None and not bool(gradient.isfinite().all()):
            names.append(name)
    first = f"; the first is that of {names[0]!r}" if names else ""
    return UsageError(
        f"gradients are not finite although the loss is no longer scaled{first}; "
        "float16 holds no number beyond 65,504: use precision bf16, a lower learning "
        "rate, or look for what overflows in this layer"
    )
