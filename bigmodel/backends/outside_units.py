"""Where the modules around a model's units belong when the model is cut.

Only definitions are looked at, because no batch is there when a model is cut:

    defined              belongs to
    before all units     the first stage
    between two          the stage of the unit that follows
    after all units      the last stage

Two habits of model authors are known: a norm that is called final is one even where it
is defined before the units (OPT), and what is named after embeddings belongs before the
units of its own container even where it is defined after them (BART).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from bigmodel.plans import Plan


def parts(
    model: nn.Module, units: frozenset[str], path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield units, and the largest modules with tensors that hold no unit.

    Args:
        model: The model, or the module at `path` in it.
        units: Paths of the units.
        path: Where the module is.
    """
    for name, child in model.named_children():
        at = f"{path}.{name}" if path else name
        holds = any(unit.startswith(f"{at}.") for unit in units)
        if holds and at not in units:
            yield from parts(child, units, at)
        elif at in units or _has_tensors(child):
            yield at, child


def stages_of_parts(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Return the stage of every part of a model, by path, in order of definition.

    Args:
        model: The whole model.
        plan: With stages.
    """
    numbers = {path: index for index, path in enumerate(plan.units)}
    found = list(parts(model, frozenset(plan.units)))
    held = [at for at, (path, _) in enumerate(found) if path in numbers]
    stages: dict[str, int] = {}
    for at, (path, module) in enumerate(found):
        following = [found[unit][0] for unit in held if unit >= at]
        if _embeds(path) and path not in numbers:
            beside = [unit for unit in plan.units if _container(path, unit)]
            following = beside[:1] or following
        if not following or (at < held[0] and _is_final_norm(path, module)):
            stages[path] = plan.num_stages - 1
        elif following[0] == found[held[0]][0] and path not in numbers:
            stages[path] = 0
        else:
            stages[path] = plan.stage_of(numbers[following[0]])
    return stages


def _container(path: str, unit: str) -> bool:
    """Say whether a part and the list that a unit is in have the same parent."""
    parent = path.rpartition(".")[0]
    return unit.rpartition(".")[0].rpartition(".")[0] == parent


def _embeds(path: str) -> bool:
    return "emb" in path.rpartition(".")[2]


def _is_final_norm(path: str, module: nn.Module) -> bool:
    name = path.rpartition(".")[2]
    final = "final" in name or "post" in name or name in ("norm", "ln_f")
    return final and "Norm" in type(module).__name__


def _has_tensors(module: nn.Module) -> bool:
    found = next(module.parameters(), None)
    return found is not None or next(module.buffers(), None) is not None
