"""Every way of spreading a model that is measured: one file for each backend.

A file has `layouts(world, units, elements)`, which yields names and plans with
micro-batch 1 and the least accumulation that the plan can have. Plans of one file must
differ in what they do to memory or to the order of sums.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator

from bigmodel.plans import Plan


def all_layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    """Yield name and plan of every layout of every backend.

    Args:
        world: Processes.
        units: Module paths of the model's blocks.
        elements: Its number of parameters, for buckets that are filled several times.
    """
    for found in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{found.name}")
        yield from module.layouts(world, units, elements)


def not_here(plan: Plan) -> str:
    """Return why a plan cannot run on this machine; empty where it can."""
    if plan.backend == "horovod" and importlib.util.find_spec("horovod") is None:
        return "horovod is not installed (release 0.28.1 does not build as it is)"
    return ""


def even_cuts(units: tuple[str, ...], stages: int) -> tuple[int, ...]:
    """Cut units into stages of about as many each."""
    return tuple(len(units) * index // stages for index in range(1, stages))
