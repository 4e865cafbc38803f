"""From a plan's backend to its engine."""

from __future__ import annotations

import importlib

from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.engine import AbstractEngine, Job
from bigmodel.errors import InvalidPlanError, raise_if_any


def build_engine(job: Job) -> AbstractEngine:
    """Build the engine of the plan's backend on this rank.

    Raises:
        UnknownNameError: There is no such backend.
        InvalidPlanError: The backend cannot do what the plan says.
        MissingDependencyError: Its library is not installed.
    """
    name = job.plan.backend
    backend = BACKENDS.get(name)
    raise_if_any(
        list(refusals(backend, job.plan, kind=job.device.type)), InvalidPlanError
    )
    # Imported by name: no library is loaded, or even installed, that is not used.
    module = importlib.import_module(f"bigmodel.backends.{name}.engine")
    return module.build(job)
