"""Training with layers dealt to the devices of one process."""

from __future__ import annotations

from typing import Any, final

from bigmodel.backends.batch import to_device
from bigmodel.backends.engine import AbstractEngine, Job
from bigmodel.backends.naive.placing import place
from bigmodel.backends.one_process import AbstractOneProcessEngine
from bigmodel.backends.own_devices import own_devices
from bigmodel.backends.precision import cast_inputs
from bigmodel.backends.recompute import apply_recompute
from bigmodel.observe.blocks import get_blocks


def build(job: Job) -> AbstractEngine:
    """Return the engine of this process."""
    return NaiveEngine(job)


@final
class NaiveEngine(AbstractOneProcessEngine):
    """Every module's inputs are moved to its device; autograd moves gradients back.

    The user's loss function finds the output where the batch is, on the first device.
    """

    def __init__(self, job: Job) -> None:
        model, plan = job.model, job.plan
        apply_recompute(get_blocks(model, plan.units), plan)
        place(model, plan, own_devices(job.device, plan.devices_per_process))
        super().__init__(job, model)

    def call(self, *positional: Any, **named: Any) -> Any:
        """Call the model."""
        positional, named = cast_inputs(self._plan, (positional, named))
        output = self._model(*positional, **named)
        return output if self._loss is None else to_device(output, self._device)

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Return the model's output on the first device, where users' batches are."""
        return to_device(super().forward(*positional, **named), self._device)
