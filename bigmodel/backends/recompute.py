"""Recomputing activations in the backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
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
    for name, block in blocks.items():
        if policies.get(name) == "full":
            recompute_fully(block)


def recompute_fully(block: nn.Module) -> None:
    """Let a block keep only its inputs and run its forward again in the backward."""
    # A plain attribute hides the method of the class; modules allow it.
    block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # wraps: transformers looks at the signature of what it calls.
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
