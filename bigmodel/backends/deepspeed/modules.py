"""The modules of a unit, read off the names of its parameters.

DeepSpeed hangs its hooks on modules, while a unit names parameters only. Modules
without parameters inside a unit are therefore not seen; they hold nothing.
"""

from __future__ import annotations

from bigmodel.backends.walk import Step

Module = tuple[str, ...]
"""Full names of the parameters that a module holds itself, no child of it."""


def full_name(step: Step, name: str) -> str:
    """Return the full name of a parameter of a unit."""
    path = step.placed.path
    return f"{path}.{name}" if path else name


def modules_of(step: Step, seen: set[str]) -> tuple[Module, ...]:
    """Return the modules of a unit in the order in which their forwards begin.

    Args:
        step: The unit.
        seen: Paths of modules that earlier units have begun; added to. The parts before
            and after the blocks share parents.
    """
    found: dict[str, list[str]] = {}
    if step.placed.path not in seen:
        found[step.placed.path] = []
    for param in step.unit.params:
        if param.buffer:
            continue
        name = full_name(step, param.name)
        *parents, _ = name.split(".")
        for depth in range(len(parents) + 1):
            path = ".".join(parents[:depth])
            if path.startswith(step.placed.path) and path not in seen:
                found.setdefault(path, [])
        found.setdefault(".".join(parents), []).append(param.tied_to or name)
    seen.update(found)
    return tuple(tuple(names) for names in found.values())
