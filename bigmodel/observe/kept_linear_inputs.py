"""Linear layers that keep their inputs whether their weights train or not.

ZeRO stage 3 replaces torch's `linear` by one of that kind (deepspeed 0.19,
`runtime/zero/linear.py`). torch's own keeps the input of a frozen layer only if
something else needs it, so that models with frozen parts, such as those with adapters,
hold more under stage 3. Here a `linear` of our own with the same habits is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _KeepingLinear(torch.autograd.Function):
    """`input @ weight.T + bias`; always saves all three."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(value, weight, bias)
        if value.dim() == 2 and bias is not None:
            return torch.addmm(bias, value, weight.t())
        output = value.matmul(weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        value, weight, bias = ctx.saved_tensors
        of_value = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_value = gradient.matmul(weight)
        if ctx.needs_input_grad[1]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_weight = rows.t().matmul(value.reshape(-1, value.shape[-1]))
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient.sum(tuple(range(gradient.dim() - 1)))
        return of_value, of_weight, of_bias


@contextmanager
def inputs_kept() -> Iterator[None]:
    """Let every linear layer keep its input."""

    def linear(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return _KeepingLinear.apply(value, weight, bias)

    own = functional.linear
    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = own
