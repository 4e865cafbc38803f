"""Number formats: what is computed in half precision and what stays in fp32.

`bf16` and `fp16` always mean forward and backward in that type with fp32 master weights
and fp32 optimizer states. FSDP2 and DeepSpeed keep the masters themselves; the other
backends use `MasterWeights`. Buffers keep their dtype. The model is given its
floating-point inputs in the same type (`cast_inputs`), the loss function gets the batch
as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from bigmodel.backends.batch import cast_floats
from bigmodel.backends.engine import OptimizerFactory
from bigmodel.backends.fp32_sums import Fp32Sums
from bigmodel.backends.optimizers import build_optimizer
from bigmodel.plans import Plan


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of forward and loss: autocast where the plan says so."""
    form = plan.number_format
    if not form.autocast:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, form.compute))


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Turn the fp32 parameters of a model into `dtype` in place; buffers stay."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)


def cast_inputs(plan: Plan, inputs: Any) -> Any:
    """Return a model's inputs in the dtype of its weights."""
    form = plan.number_format
    return cast_floats(inputs, getattr(torch, form.weights)) if form.masters else inputs


class MasterWeights:
    """The user's optimizer over fp32 copies of parameters that become half precision.

    Build it while the parameters are still fp32 and on their device, then call
    `cast_weights`. One step: `gather_gradients`, clip `named()`, step the optimizer,
    `scatter_weights`, `drop_gradients`. `module` and `optimizer` are what a checkpoint
    must hold.

    Args:
        factory: Builds the optimizer over the copies.
        params: The trained parameters of the model, by name.
        sums: Whether gradients add up in the masters during backward, because several
            backwards make one step.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        params: Mapping[str, nn.Parameter],
        *,
        sums: bool,
    ) -> None:
        self._params = dict(params)
        self._masters = {
            name: nn.Parameter(parameter.detach().to(torch.float32, copy=True))
            for name, parameter in params.items()
        }
        self.module = _holder(self._masters)
        """A module without a forward that holds the masters under the same names, for
        torch's checkpoint functions."""
        self.optimizer = build_optimizer(factory, self._masters)
        """The optimizer over the masters."""
        pairs = {params[name]: master for name, master in self._masters.items()}
        self.sums = Fp32Sums(pairs, during_backward=sums)
        """Brings the gradients to the masters."""

    def named(self) -> dict[str, nn.Parameter]:
        """Return the masters by name; their gradients are the ones to clip."""
        return dict(self._masters)

    def gather_gradients(self) -> None:
        """Move what gradients the parameters have to the masters, as fp32."""
        self.sums.finish()

    def drop_gradients(self) -> None:
        """Drop the gradients of the masters."""
        for master in self._masters.values():
            master.grad = None

    @torch.no_grad()
    def scatter_weights(self) -> None:
        """Round the masters into the parameters that the model computes with."""
        for name, parameter in self._params.items():
            parameter.copy_(self._masters[name])


def _holder(params: Mapping[str, nn.Parameter]) -> nn.Module:
    root = nn.Module()
    for name, parameter in params.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            child = module._modules.get(part)
            if child is None:
                child = nn.Module()
                module.add_module(part, child)
            module = child
        module.register_parameter(leaf, parameter)
    return root
