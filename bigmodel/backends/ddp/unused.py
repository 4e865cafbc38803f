"""Parameters that got no gradient, by name, before DDP waits for them in vain."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigmodel.errors import UsageError

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def check_all_used(
    wrapped: DistributedDataParallel, params: dict[str, nn.Parameter], *, first: bool
) -> None:
    """Raise if a bucket was never sent because a parameter had no gradient.

    DDP itself says so at the next forward, with the indices of the parameters.

    Args:
        wrapped: After a backward that averages.
        params: The trained parameters by name, in the order of the model.
        first: Whether no step was taken before.

    Raises:
        UsageError: Names the parameters, their modules and the cure.
    """
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        found = _INDICES.search(str(error))
        if found is None:
            raise
        every = list(params)
        names = [every[int(index)] for index in found.group(1).split()]
        before = not first or all(params[name].grad is not None for name in names)
        raise UsageError(_unused(names, before)) from None


def _unused(names: list[str], before: bool) -> str:
    modules = dict.fromkeys(name.rpartition(".")[0] or "the model" for name in names)
    when = (
        "in this micro-batch, while they had been used before"
        if before
        else "in the first step, and were never used so far"
    )
    return (
        f"{len(names)} parameters got no gradient {when}: {', '.join(names)} (of "
        f"{', '.join(modules)}); the ranks would wait for them for ever: freeze what "
        "is never used (requires_grad_(False)), or plan with "
        "DdpOptions(find_unused=True) where it is used in some steps only"
    )
