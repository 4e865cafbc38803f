"""The states of an optimizer that has not stepped yet, for files to be read into."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def make_states(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
    """Let an optimizer make its states, by a step that moves and counts nothing.

    Optimizers make them in their first step. torch's checkpoint functions would do the
    same, and leave it counted: a run that saves before its first step would then train
    otherwise than one that does not.

    Args:
        optimizer: With those parameters in its groups.
        params: What it steps; their gradients are as before afterwards.
    """
    if optimizer.state:
        return
    several = [param for param in params if param.requires_grad]
    gradients = [param.grad for param in several]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for param in several:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        if "lr" in group:
            # A tensor stays one.
            group["lr"] = group["lr"] * 0
    optimizer.step()
    for param, gradient in zip(several, gradients, strict=True):
        param.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    for state in optimizer.state.values():
        steps = state.get("step")
        if isinstance(steps, Tensor):
            steps.zero_()
        elif steps is not None:
            state["step"] = 0
