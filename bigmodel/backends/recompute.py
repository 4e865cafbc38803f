"""Recomputing activations in the backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from bigmodel.plans import Plan


def apply_recompute(blocks: Mapping[str, nn.Module], plan: Plan) -> None:
    """Let the blocks whose policy is `full` keep only their inputs.

    The block's `forward` is replaced on the instance; a wrapper module would change the
    names of its parameters. Names that the plan does not list as units are left alone,
    so a pipeline stage may pass the blocks it holds under their global names.
    """
    if not plan.recompute:
        return
    policies = dict(zip(plan.units, plan.recompute, strict=True))
    on_cpu = plan.offload.activations == "cpu"
    for name, block in blocks.items():
        if policies.get(name) == "full":
            recompute_fully(block, inputs_on_cpu=on_cpu)


def recompute_fully(block: nn.Module, *, inputs_on_cpu: bool = False) -> None:
    """Let a block keep only its inputs and run its forward again in the backward.

    Args:
        block: Its `forward` is replaced.
        inputs_on_cpu: Whether positional inputs wait in the CPU's memory, pinned where
            there are GPUs. torch 2.13 keeps others (masks) wherever they are.
    """
    # A plain attribute hides the method of the class; modules allow it.
    block.forward = _checkpointed(block.forward, inputs_on_cpu)


def _checkpointed(
    forward: Callable[..., Any], inputs_on_cpu: bool
) -> Callable[..., Any]:
    # wraps: transformers looks at the signature of what it calls.
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        pinned = torch.cuda.is_available()
        # The hooks of checkpointing lie above these: of the block only inputs move.
        with save_on_cpu(pin_memory=pinned) if inputs_on_cpu else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
