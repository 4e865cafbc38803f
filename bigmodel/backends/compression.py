"""What torch's communication hooks of DDP hold and send.

Source: torch 2.13, `torch/distributed/algorithms/ddp_comm_hooks/{default_hooks,
powerSGD_hook}.py`. The half-precision hooks send a copy of the bucket. PowerSGD sends
two factors of every matrix that they make at least twice smaller, keeps the factors and
what they missed of every gradient, and while it works on a bucket holds a copy of it
and the new misses beside the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from bigmodel.models import Param
from bigmodel.plans import DdpOptions

_LEAST_RATE = 2
"""`min_compression_rate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Bytes of a hook."""

    held: int = 0
    """Kept from step to step."""
    sent: float = 1.0
    """Sent for every byte of gradients."""
    surge: float = 0.0
    """Held for every byte of a bucket while the hook works on it."""


def compression(
    options: DdpOptions, trained: Sequence[Param], width: int
) -> Compression:
    """Return what the plan's hook does once it has set in.

    Args:
        options: Those of the plan.
        trained: The parameters whose gradients are reduced.
        width: Bytes of an element of their gradients.
    """
    if options.hook in ("fp16", "bf16"):
        return Compression(sent=2 / width, surge=2 / width)
    if options.hook != "powersgd":
        return Compression()
    elements = sum(param.elements for param in trained)
    factors, whole = 0, 0
    for param in trained:
        rows = param.shape[0] if param.shape else 1
        columns = prod(param.shape[1:])
        rank = min(rows, columns, options.powersgd_rank)
        size = (rows + columns) * rank
        if size * _LEAST_RATE < param.elements:
            factors += size
        else:
            whole += param.elements
    return Compression(
        held=(elements + factors) * width,
        sent=(factors + whole) / max(elements, 1),
        surge=2.0,
    )
