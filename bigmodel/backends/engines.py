"""From a plan's backend to its engine."""

from __future__ import annotations

import importlib
import pkgutil

from bigmodel import backends
from bigmodel.backends.engine import AbstractEngine, Job
from bigmodel.errors import UnknownNameError


def backend_names() -> tuple[str, ...]:
    """Return the backends there are: every folder here is one."""
    return tuple(
        entry.name for entry in pkgutil.iter_modules(backends.__path__) if entry.ispkg
    )


def build_engine(job: Job) -> AbstractEngine:
    """Build the engine of the plan's backend on this rank.

    Raises:
        UnknownNameError: There is no such backend.
        InvalidPlanError: The backend cannot do what the plan says.
        MissingDependencyError: Its library is not installed.
    """
    name = job.plan.backend
    if name not in backend_names():
        raise UnknownNameError("backend", name, backend_names())
    # Imported by name: no backend is loaded, or even installed, that is not used.
    module = importlib.import_module(f"bigmodel.backends.{name}.engine")
    return module.build(job)
