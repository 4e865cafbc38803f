"""What can be wrong with a plan for this model and this cluster, as data."""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import OPTIMIZERS, ModelSpec
from bigmodel.plans import NUMBER_FORMATS, Plan


def violations(plan: Plan, model: ModelSpec, cluster: Cluster) -> Iterator[Violation]:
    """Yield every rule that the plan breaks for this model and this cluster."""
    if plan.num_devices != cluster.world:
        yield Violation(
            field="mesh",
            got=str(plan.mesh),
            rule=f"it needs {plan.num_devices} devices and {cluster.name} has "
            f"{cluster.world}",
            cure="make the product of the axes the number of devices",
        )
    yield from dtype_violations(plan.precision, cluster)
    if plan.optimizer not in OPTIMIZERS:
        yield Violation(
            field="optimizer",
            got=plan.optimizer,
            rule=f"known optimizers: {', '.join(OPTIMIZERS.names())}",
        )
    if plan.precision != model.precision:
        yield Violation(
            field="precision",
            got=plan.precision,
            rule=f"{model.name} was traced for {model.precision}",
            cure="trace it again with the plan's precision",
        )
    if plan.units != model.units:
        yield Violation(
            field="units",
            got=f"{len(plan.units)} units",
            rule=f"{model.name} has {len(model.units)} units, "
            f"{', '.join(model.units[:2])} ...",
            cure="plan again for this model",
        )
    if plan.backend not in BACKENDS:
        yield Violation(
            field="backend",
            got=plan.backend,
            rule=f"known backends: {', '.join(BACKENDS.names())}",
        )
        return
    yield from refusals(BACKENDS.get(plan.backend), plan, model, cluster)


def dtype_violations(precision: str, cluster: Cluster) -> Iterator[Violation]:
    """Yield the element type that the device lacks."""
    dtype = NUMBER_FORMATS[precision].compute
    if dtype not in cluster.device.peaks:
        yield Violation(
            field="precision",
            got=precision,
            rule=f"{cluster.device.name} does not compute in {dtype}",
            cure=f"it has {', '.join(cluster.device.peaks)}: use precision fp32",
        )
