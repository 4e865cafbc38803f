"""Parameters that a plan leaves out of sharding: whole and equal on every rank.

FSDP2 neither moves them nor reduces their gradients, so both are done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bigmodel.errors import UsageError, Violation


@final
class WholeParameters:
    """The parameters below some module paths.

    Args:
        model: Before it is sharded.
        paths: Paths of its modules.

    Raises:
        UsageError: A module is missing, or a parameter is tied to one outside.
    """

    def __init__(self, model: nn.Module, paths: tuple[str, ...]) -> None:
        modules = dict(model.named_modules())
        for path in paths:
            if path not in modules:
                raise UsageError(
                    Violation(
                        field="fsdp2.ignored",
                        got=path,
                        rule=f"{type(model).__name__} has no module of this path",
                    )
                )
        prefixes = tuple(f"{path}." for path in paths)
        inside: dict[nn.Parameter, str] = {}
        outside: dict[nn.Parameter, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            side = inside if name.startswith(prefixes) else outside
            side.setdefault(parameter, name)
        for parameter in inside.keys() & outside.keys():
            raise UsageError(
                Violation(
                    field="fsdp2.ignored",
                    got=inside[parameter],
                    rule=f"it is tied to {outside[parameter]!r}, which is sharded",
                    cure="ignore both modules, or neither",
                )
            )
        self.parameters = tuple(inside)
        """All of them, trained or not, each once."""
        self._trained = tuple(p for p in inside if p.requires_grad)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over all ranks; where one rank has none it counts as 0.

        Where no rank has one, none is made: the parameter then keeps its value.
        """
        ranks = dist.get_world_size()
        if not self._trained or ranks == 1:
            return
        used = torch.tensor(
            [p.grad is not None for p in self._trained],
            dtype=torch.int32,
            device=self._trained[0].device,
        )
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for parameter, anywhere in zip(self._trained, used.tolist(), strict=True):
            if not anywhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks


def clip_shards_and_whole(params: Mapping[str, nn.Parameter], limit: float) -> Tensor:
    """Clip by the norm of shards, summed over ranks, and of whole gradients, once.

    Returns:
        The norm before.
    """
    given = [p for p in params.values() if p.grad is not None]
    sides = [
        [p for p in given if isinstance(p, DTensor)],
        [p for p in given if not isinstance(p, DTensor)],
    ]
    norms = [
        get_total_norm([p.grad for p in side if p.grad is not None]) for side in sides
    ]
    shards, whole = (n.full_tensor() if isinstance(n, DTensor) else n for n in norms)
    total = torch.hypot(shards.to(whole.device), whole)
    for side in sides:
        clip_grads_with_norm_(side, limit, total)
    return total


def separate_groups(optimizer: torch.optim.Optimizer) -> None:
    """Put whole parameters into groups of their own, with the same settings.

    torch's foreach optimizers step the tensors of a group together and cannot mix them
    with shards.
    """
    for group in list(optimizer.param_groups):
        whole = [p for p in group["params"] if not isinstance(p, DTensor)]
        if whole and len(whole) < len(group["params"]):
            group["params"] = [p for p in group["params"] if isinstance(p, DTensor)]
            settings = {key: value for key, value in group.items() if key != "params"}
            optimizer.add_param_group({**settings, "params": whole})
