"""Finding the blocks of a model: the units that are wrapped, recomputed and cut."""

from __future__ import annotations

from torch import nn

from bigmodel.errors import UsageError


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the module paths of the repeated blocks, in order of definition.

    These are the children of the outermost `nn.ModuleList`s and `nn.Sequential`s with
    at least two children that hold parameters. A model without any has no blocks:
    all of it is one unit.
    """
    found: list[str] = []
    _collect(model, "", found)
    return tuple(found)


def _collect(module: nn.Module, path: str, found: list[str]) -> None:
    children = [
        (f"{path}.{name}" if path else name, child)
        for name, child in module.named_children()
    ]
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        holders = sum(_holds_parameters(child) for _, child in children)
        if holders >= 2:
            found += [name for name, _ in children]
            return
    for name, child in children:
        _collect(child, name, found)


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def get_blocks(model: nn.Module, units: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the modules that a plan names as units, or those found when it names none.

    Raises:
        UsageError: The model has no module of such a name; the plan is for another one.
    """
    names = units or find_blocks(model)
    modules = dict(model.named_modules())
    missing = [name for name in names if name not in modules]
    if missing:
        raise UsageError(
            f"the plan names {len(missing)} units that {type(model).__name__} does not "
            f"have, such as {missing[0]!r}; it was made for another model: plan again"
        )
    return {name: modules[name] for name in names}
