"""The states of what an optimizer has not stepped yet, for files to be read into."""

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
        params: Those of them that lack states are given them; gradients are as before
            afterwards.
    """
    several = [p for p in params if p.requires_grad and p not in optimizer.state]
    if not several:
        return
    everyone = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    rates = [group.get("lr") for group in optimizer.param_groups]
    for param in everyone:
        param.grad = None
    for param in several:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        if "lr" in group:
            # A tensor stays one.
            group["lr"] = group["lr"] * 0
    optimizer.step()
    for param, gradient in everyone.items():
        param.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    for param in several:
        state = optimizer.state.get(param, {})
        steps = state.get("step")
        if isinstance(steps, Tensor):
            steps.zero_()
        elif steps is not None:
            state["step"] = 0
