"""Training with torch.nn.DataParallel. Without GPUs torch runs the model as it is."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigmodel.backends.engine import AbstractEngine, Job
from bigmodel.backends.one_process import AbstractOneProcessEngine
from bigmodel.backends.own_devices import own_devices
from bigmodel.backends.precision import cast_inputs
from bigmodel.backends.recompute import contexts
from bigmodel.observe.blocks import get_blocks


def build(job: Job) -> AbstractEngine:
    """Return the engine of this process."""
    return DataParallelEngine(job)


@final
class DataParallelEngine(AbstractOneProcessEngine):
    """Copies of the model on all devices, for one forward and backward each.

    The user's loss function is given the gathered output; without one the losses of the
    devices are averaged.
    """

    def __init__(self, job: Job) -> None:
        model, plan = job.model, job.plan
        model.to(job.device)
        blocks = get_blocks(model, plan.units)
        for unit, policy in zip(plan.units, plan.recompute, strict=False):
            if policy != "none":
                recompute_in_copies(blocks[unit], policy)
        super().__init__(job, model)
        devices = own_devices(job.device, plan.devices_per_process)
        self._copies = len(devices) if job.device.type != "cpu" else 1
        self._wrapped: nn.DataParallel[Any] = nn.DataParallel(
            model, device_ids=None if self._copies == 1 else devices
        )

    def call(self, *positional: Any, **named: Any) -> Any:
        """Call the model on all devices."""
        positional, named = cast_inputs(self._plan, (positional, named))
        output = self._wrapped(*positional, **named)
        return mean_losses(output, self._copies) if self._loss is None else output

    def evaluation_call(self, *positional: Any, **named: Any) -> Any:
        """Call the model on the first device alone."""
        positional, named = cast_inputs(self._plan, (positional, named))
        return self._model(*positional, **named)


def recompute_in_copies(block: nn.Module, policy: str) -> None:
    """Let a block, and every copy of it, recompute by a policy.

    DataParallel copies the attributes of a module: a `forward` among them would go on
    running the original, with its weights. The class is what copies share.
    """
    kind = type(block)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(kind.forward, self)
        around = functools.partial(contexts, self, policy)
        return checkpoint(run, *args, use_reentrant=False, context_fn=around, **kwargs)

    block.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def mean_losses(output: Any, copies: int) -> Any:
    """Return a gathered output with one loss in place of one for every copy.

    torch gathers tensors without dimensions into a vector. The loss is looked for
    where `compute_loss` does.
    """
    if copies == 1:
        return output
    if isinstance(output, Tensor):
        return _mean(output, copies)
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        # A dict's own class: outputs of transformers must stay what they are.
        changed: Any = output
        changed["loss"] = _mean(output["loss"], copies)
        return changed
    if isinstance(output, (tuple, list)):
        return tuple(
            _mean(value, copies) if isinstance(value, Tensor) else value
            for value in output
        )
    return output


def _mean(value: Tensor, copies: int) -> Tensor:
    return value.mean() if value.shape == (copies,) else value
