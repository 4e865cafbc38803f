"""What the engines of one process have in common, however many devices it owns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bigmodel.backends.engine import Job, Update
from bigmodel.backends.state_files import load_state, save_state
from bigmodel.backends.updating import Updater
from bigmodel.backends.whole_model import AbstractWholeModelEngine


class AbstractOneProcessEngine(AbstractWholeModelEngine):
    """Nobody to reduce with: gradients add up until the optimizer's step.

    Args:
        job: The job.
        model: The user's model, on its devices.
        several_backwards: Whether every micro-batch has a backward of its own.
    """

    def __init__(
        self, job: Job, model: nn.Module, *, several_backwards: bool = True
    ) -> None:
        super().__init__(job)
        self._model = model
        self._updater = Updater(
            model,
            job.optimizer,
            job.plan,
            job.clip_norm,
            several_backwards=several_backwards,
        )

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer, over the masters where there are any."""
        return self._updater.optimizer

    def begin(self, *, last: bool) -> None:
        """Do nothing: gradients stay where they are."""

    def backward(self, loss: Tensor) -> None:
        """Run backward."""
        self._updater.scale.scale(loss).backward()

    def update(self) -> Update:
        """Clip, step and drop the gradients."""
        return self._updater.update()

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights, in fp32 where there are masters."""
        masters: Mapping[int, Tensor] = {}
        if self._updater.masters is not None:
            pairs = self._updater.masters.named()
            masters = {id(self._updater.weights[n]): pairs[n] for n in pairs}
        return {
            name: masters.get(id(value), value).detach().cpu().clone()
            for name, value in self._model.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }

    def save(self, folder: str) -> None:
        """Write weights and optimizer states."""
        save_state(folder, self._model, self._updater)

    def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        load_state(folder, self._model, self._updater)
