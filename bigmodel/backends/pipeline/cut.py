"""What a model looks like once it has been cut down to one stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bigmodel.backends.engine import Batch, Job
from bigmodel.backends.forward import model_inputs
from bigmodel.backends.precision import cast_inputs


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the hidden states in the form of what a block returns."""


SLOT = Slot()


class AbstractCut(ABC):
    """A model that holds one stage only, and how that stage is run.

    Cutting works in place and keeps the names of what stays, so that the weights of a
    stage have the names they have in the whole model.
    """

    def __init__(self, job: Job, stage: int) -> None:
        self.model: nn.Module = job.model
        self.is_first = stage == 0
        self.is_last = stage == job.plan.num_stages - 1
        self.complaints: list[str] = []
        """Why this stage does not compute what the whole model computes."""
        self.watches = False
        """Whether the next run needs a graph, for `verify`."""
        self.entry_form: Any = SLOT
        """How the block before this stage returned hidden states."""
        self.leaving_form: Any = SLOT
        """How the last block of this stage did."""
        self._plan = job.plan
        self._loss = job.loss

    @abstractmethod
    def run(self, hidden: Tensor | None, batch: Batch) -> Any:
        """Run the stage on a micro-batch.

        Args:
            hidden: What the stage before returned; None on the first stage.
            batch: The micro-batch, which every stage of a pipeline is given.

        Returns:
            The hidden states for the next stage; the model's output on the last one.
        """

    def watch_first_run(self) -> None:  # noqa: B027
        """Look, in the next run, for what can only be seen in one.

        By default there is nothing to see.
        """

    def verify(self, output: Tensor) -> None:  # noqa: B027
        """Add to `complaints` what a watched run shows.

        Args:
            output: Hidden states, or the loss, with their graph.
        """

    def _inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_inputs(self._plan, model_inputs(self.model, batch, self._loss))
