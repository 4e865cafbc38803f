"""Numbers that every rank tells the others."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_numbers(value: int, world: int, device: torch.device) -> list[int]:
    """Return the number of every rank, in the order of ranks; collective."""
    if world == 1:
        return [value]
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    return [int(number) for number in torch.cat(everyone).tolist()]
