"""Plan, estimate and train models that do not fit on one device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigmodel.api.clusters import cluster as cluster
    from bigmodel.api.exporting import accelerator as accelerator
    from bigmodel.api.exporting import trainer_arguments as trainer_arguments
    from bigmodel.api.planning import estimate as estimate
    from bigmodel.api.planning import plan as plan
    from bigmodel.api.tracing import trace as trace
    from bigmodel.clusters.machine import Cluster as Cluster
    from bigmodel.errors import BigModelError as BigModelError
    from bigmodel.errors import InvalidClusterError as InvalidClusterError
    from bigmodel.errors import InvalidPlanError as InvalidPlanError
    from bigmodel.errors import MissingDependencyError as MissingDependencyError
    from bigmodel.errors import NothingFitsError as NothingFitsError
    from bigmodel.errors import OutOfMemoryError as OutOfMemoryError
    from bigmodel.errors import PlanFileError as PlanFileError
    from bigmodel.errors import TracingError as TracingError
    from bigmodel.errors import UnknownNameError as UnknownNameError
    from bigmodel.errors import UsageError as UsageError
    from bigmodel.errors import WorkerError as WorkerError
    from bigmodel.errors import WorldError as WorldError
    from bigmodel.models.spec import ModelSpec as ModelSpec
    from bigmodel.plans.mesh import Mesh as Mesh
    from bigmodel.plans.options import DdpOptions as DdpOptions
    from bigmodel.plans.options import DeepSpeedOptions as DeepSpeedOptions
    from bigmodel.plans.options import FairscaleOptions as FairscaleOptions
    from bigmodel.plans.options import Fsdp2Options as Fsdp2Options
    from bigmodel.plans.options import HorovodOptions as HorovodOptions
    from bigmodel.plans.options import Offload as Offload
    from bigmodel.plans.training_plan import Plan as Plan
    from bigmodel.plans.training_plan import Stages as Stages
    from bigmodel.running.decay_groups import decay_groups as decay_groups
    from bigmodel.running.packing import pack as pack
    from bigmodel.running.progress import Progress as Progress
    from bigmodel.running.session import Engine as Engine
    from bigmodel.running.session import prepare as prepare
    from bigmodel.search.decision import Decision as Decision
    from bigmodel.search.prediction import Estimate as Estimate

__version__ = "0.1.0"

_HOMES = {
    "trace": "api.tracing",
    "cluster": "api.clusters",
    "plan": "api.planning",
    "estimate": "api.planning",
    "accelerator": "api.exporting",
    "trainer_arguments": "api.exporting",
    "prepare": "running.session",
    "Engine": "running.session",
    "Progress": "running.progress",
    "decay_groups": "running.decay_groups",
    "pack": "running.packing",
    "Plan": "plans.training_plan",
    "Stages": "plans.training_plan",
    "Offload": "plans.options",
    "DdpOptions": "plans.options",
    "Fsdp2Options": "plans.options",
    "DeepSpeedOptions": "plans.options",
    "FairscaleOptions": "plans.options",
    "HorovodOptions": "plans.options",
    "Mesh": "plans.mesh",
    "ModelSpec": "models.spec",
    "Cluster": "clusters.machine",
    "Decision": "search.decision",
    "Estimate": "search.prediction",
    "BigModelError": "errors",
    "UsageError": "errors",
    "UnknownNameError": "errors",
    "InvalidPlanError": "errors",
    "PlanFileError": "errors",
    "InvalidClusterError": "errors",
    "TracingError": "errors",
    "MissingDependencyError": "errors",
    "WorldError": "errors",
    "NothingFitsError": "errors",
    "OutOfMemoryError": "errors",
    "WorkerError": "errors",
}
"""Module of every public name; imported at first use, so that `import bigmodel` is
cheap and loads no torch."""

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bigmodel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"bigmodel.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
