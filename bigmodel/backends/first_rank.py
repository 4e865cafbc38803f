"""Giving every rank the values of rank 0, a tensor at a time, on its device.

A rank may come with a model on the `meta` device, which has names and shapes and no
memory. Its tensors are made when their values arrive, so it never holds more of the
model than what is filled and not yet sharded.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigmodel.errors import UsageError


@final
class FirstRankValues:
    """Fills the parameters and buffers of modules, each once.

    Args:
        device: Where they are to be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Weak: what is sharded must be let go.
        self._filled: dict[int, weakref.ref[Tensor]] = {}

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Fill what of a module has not been filled; all ranks call it together.

        Objects stay the same, so tied parameters stay tied.
        """
        for tensor in chain(module.parameters(), module.buffers()):
            known = self._filled.get(id(tensor))
            if isinstance(tensor, DTensor) or (known and known() is tensor):
                continue
            if tensor.is_meta:
                _materialise(tensor, self._device)
            # Dense, because collectives need it; a broadcast view would send once.
            values = tensor.detach().to(self._device).contiguous()
            if dist.get_world_size() > 1:
                dist.broadcast(values, 0)
            tensor.data = values
            self._filled[id(tensor)] = weakref.ref(tensor)


def _materialise(tensor: Tensor, device: torch.device) -> None:
    """Give a tensor on `meta` memory of its own, without values."""
    real = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    # What users note on parameters (no weight decay) goes with the swap.
    vars(real).update(vars(tensor))
    torch.utils.swap_tensors(tensor, real)


def check_same_structure(model: nn.Module) -> None:
    """Find out whether all ranks have a model of the same names and shapes.

    Raises:
        UsageError: On every rank, if one has not; names the first difference.
    """
    here = [_text(*entry) for entry in _entries(model)]
    digest = hashlib.sha256("\n".join(here).encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not others:
        return
    received = [here]
    dist.broadcast_object_list(received, 0)
    lists: list[list[str]] = [[] for _ in digests]
    mine = here if dist.get_rank() == others[0] else []
    dist.all_gather_object(lists, mine)
    pairs = zip([*received[0], "nothing"], [*lists[others[0]], "nothing"], strict=False)
    first, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise UsageError(
        f"rank {others[0]} has another model than rank 0: {other} where rank 0 has "
        f"{first}; the model, or the function that makes it, must be the same on all "
        "ranks and must not depend on the device that tensors are made on"
    )


def _entries(model: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    names: dict[int, str] = {}
    tensors = chain(
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    for name, tensor in tensors:
        yield name, tensor, names.setdefault(id(tensor), name)


def _text(name: str, tensor: Tensor, first: str) -> str:
    tie = f" tied to {first}" if first != name else ""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {tuple(tensor.shape)} {kind}{tie}"
