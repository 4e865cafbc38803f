"""What may stand where an optimizer is expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from bigmodel.backends.engine import OptimizerFactory
from bigmodel.backends.optimizers import NamedOptimizerFactory, rebuild
from bigmodel.errors import UsageError


def as_factory(
    optimizer: torch.optim.Optimizer | Callable[..., Any], model: nn.Module
) -> OptimizerFactory:
    """Return a factory for what the user gave.

    Args:
        optimizer: A factory, `lambda params: AdamW(params, lr=1e-3)`; or an optimizer
            that has not stepped yet, whose class, settings and groups are kept.
        model: The model. Parameters that a given optimizer leaves out are frozen.

    Raises:
        UsageError: The optimizer has stepped, or is over parameters of another model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise UsageError(
                f"a {type(optimizer).__name__} is no optimizer; give a factory, such "
                "as lambda params: torch.optim.AdamW(params, lr=1e-3), or an optimizer"
            )
        return optimizer
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise UsageError(
            "the optimizer has already stepped, and its states cannot be moved to the "
            "plan's shards; give a fresh one, or a factory, and load a checkpoint"
        )
    factory = _Again(optimizer, model)
    for name, parameter in model.named_parameters():
        if name not in factory.groups:
            parameter.requires_grad_(False)
    return factory


def _has_stepped(state: Mapping[str, Any]) -> bool:
    # Adagrad makes its states when it is built, with step 0.
    return float(state.get("step", 1)) > 0


@final
class _Again(NamedOptimizerFactory):
    """Builds an optimizer like a given one, over other parameters of the same names."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._like = optimizer
        self._settings: list[dict[str, Any]] = []
        self.groups: dict[str, int] = {}
        """Index of the group of every parameter, by name."""
        for index, group in enumerate(optimizer.param_groups):
            self._settings.append(
                {key: value for key, value in group.items() if key != "params"}
            )
            for parameter in group["params"]:
                if parameter not in names:
                    raise UsageError(
                        "the optimizer holds a parameter of shape "
                        f"{tuple(parameter.shape)} that the model does not have; build "
                        "it over model.parameters(), or give a factory"
                    )
                self.groups[names[parameter]] = index

    def __call__(self, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        groups = [{**settings, "params": []} for settings in self._settings]
        for name, parameter in params.items():
            groups[self.groups[name]]["params"].append(parameter)
        # A pipeline stage may hold no parameter of some group.
        groups = [group for group in groups if group["params"]]
        return rebuild(self._like, groups)
