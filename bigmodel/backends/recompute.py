"""Recomputing activations in the backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bigmodel.plans import Plan
from bigmodel.plans.training_plan import RECOMPUTE_POLICIES

KEPT_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::convolution",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        # Registered by transformers; a trace runs it in place of `_grouped_mm`.
        "transformers::grouped_mm_fallback",
    }
)
"""What policy `selective` keeps the outputs of: operators that compute much for each
byte that they return. A product of two activations (`bmm`) is not one: attention
without a kernel of its own would keep its whole matrix of scores."""

Watcher = Callable[
    [nn.Module, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], None
]
"""Is given a recomputed block, its path and forward, and the arguments of a call."""

_watcher: Watcher | None = None
# Is told of every call of a recomputed block, before it runs.


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell a watcher of every call of a recomputed block meanwhile."""
    global _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def apply_recompute(blocks: Mapping[str, nn.Module], plan: Plan) -> None:
    """Let blocks recompute by their policies.

    The block's `forward` is replaced on the instance; a wrapper module would change the
    names of its parameters. Names that the plan does not list as units are left alone,
    so a pipeline stage may pass the blocks it holds under their global names.
    """
    if not plan.recompute:
        return
    policies = dict(zip(plan.units, plan.recompute, strict=True))
    on_cpu = plan.offload.activations == "cpu"
    for name, block in blocks.items():
        policy = policies.get(name, "none")
        if policy != "none":
            recompute(block, policy, name, inputs_on_cpu=on_cpu)


def recompute(
    block: nn.Module, policy: str, name: str = "", *, inputs_on_cpu: bool = False
) -> None:
    """Let a block run all or some of its forward again in the backward.

    Args:
        block: Its `forward` is replaced.
        policy: `full` or `selective`; see `plans.RecomputePolicy`.
        name: Its path in the model, for messages.
        inputs_on_cpu: Whether positional inputs wait in the CPU's memory, pinned where
            there are GPUs. torch 2.13 keeps others (masks) wherever they are.
    """
    # A plain attribute hides the method of the class; modules allow it.
    block.forward = _checkpointed(block, policy, name, block.forward, inputs_on_cpu)


RECOMPUTES: dict[str, Callable[[nn.Module], None]] = {
    policy: functools.partial(recompute, policy=policy)
    for policy in RECOMPUTE_POLICIES
    if policy != "none"
}
"""By policy, lets a block recompute."""


def contexts(
    block: nn.Module, policy: str
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what surrounds a block's forward, and the one in the backward."""
    if policy == "full":
        return nullcontext(), statistics_kept(block)
    first, again = create_selective_checkpoint_contexts(_kept_or_not)
    return first, _both(again, statistics_kept(block))


def _kept_or_not(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    kept = _is_kept(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _is_kept(operator: Any) -> bool:
    return operator.name() in KEPT_OPERATORS


@contextmanager
def _both(
    one: AbstractContextManager[Any], other: AbstractContextManager[Any]
) -> Iterator[None]:
    with one, other:
        yield


def _checkpointed(
    block: nn.Module,
    policy: str,
    name: str,
    forward: Callable[..., Any],
    inputs_on_cpu: bool,
) -> Callable[..., Any]:
    around = functools.partial(contexts, block, policy)

    # wraps: transformers looks at the signature of what it calls.
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _watcher is not None:
            _watcher(block, name, forward, args, kwargs)
        pinned = torch.cuda.is_available()
        # The hooks of checkpointing lie above these: of the block only inputs move.
        with save_on_cpu(pin_memory=pinned) if inputs_on_cpu else nullcontext():
            return checkpoint(
                forward, *args, use_reentrant=False, context_fn=around, **kwargs
            )

    return run


@contextmanager
def statistics_kept(block: nn.Module) -> Iterator[None]:
    """Let batch norms run without counting the batch in their running statistics.

    They normalise by the batch and keep the same tensors for backward, so a second
    forward of the same micro-batch is what the first one was.
    """
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # running = (1 - 0) * running + 0 * new; without a count nothing is counted.
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = count
