"""Methods of a sharded model that are called from outside, in place of `forward`.

Only `forward` gathers the weights by itself. What a plan lists does so too; any other
method that computes with weights stops with an error that names it and the remedy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from bigmodel.errors import UsageError, Violation

_MIXED = "mixed torch.Tensor and DTensor"
"""How torch says that an operator got a shard where it expects a tensor."""
_LIBRARIES = ("torch", "transformers", "bigmodel")
"""Their own classes are left as they are; subclasses of users are looked at."""


def open_methods(model: nn.Module, paths: tuple[str, ...]) -> None:
    """Let the listed methods gather weights, and guard the others of the root.

    Args:
        model: Already sharded.
        paths: `method` of the model, or `module.path.method`.

    Raises:
        UsageError: There is no such method, or its module is not sharded by itself.
    """
    for path in paths:
        owner, _, name = path.rpartition(".")
        module = dict(model.named_modules()).get(owner)
        if module is None or not callable(getattr(module, name, None)):
            raise UsageError(
                Violation(
                    field="fsdp2.methods",
                    got=path,
                    rule=f"{type(model).__name__} has no such method",
                )
            )
        if not isinstance(module, FSDPModule):
            raise UsageError(
                Violation(
                    field="fsdp2.methods",
                    got=path,
                    rule="only the model and the units of the plan gather weights",
                    cure="give the model a method that calls it, and list that one",
                )
            )
        register_fsdp_forward_method(module, name)
    for name in _own_methods(model):
        if name not in paths:
            # A plain attribute hides the method of the class; modules allow it.
            setattr(model, name, _guarded(name, getattr(model, name)))


def _own_methods(model: nn.Module) -> Iterator[str]:
    seen = {"forward"}
    for kind in type(model).__mro__:
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, value in vars(kind).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                if name not in seen and not hasattr(nn.Module, name):
                    yield name
                seen.add(name)


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise UsageError(
                f"{name}() computes with the shards of this rank: FSDP2 gathers "
                f"weights for forward() only; list {name!r} in fsdp2.methods of the "
                "plan, or call it from forward()"
            ) from error

    return run
