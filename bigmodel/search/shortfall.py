"""When nothing fits: by how much, where, when, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from bigmodel.plans import Plan
from bigmodel.search.measures import find_measures
from bigmodel.search.predicting import predict
from bigmodel.search.prediction import Estimate
from bigmodel.search.rules import violations
from bigmodel.simulator import Costs
from bigmodel.units import format_bytes, format_seconds

_LARGEST_FACTOR = 256


def explain_shortfall(missed: Sequence[Estimate], costs: Costs) -> str:
    """Return what the user of a cluster that is too small should read."""
    # Most were simulated without the allocator.
    plan = min(missed, key=lambda estimate: estimate.high).plan
    closest = predict(plan, costs, spans=False)
    rank = closest.fullest
    ranks = rank.ranks
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    lines = [
        f"nothing fits {costs.model.name} on {costs.cluster.describe()}",
        f"closest plan: {closest.plan.describe()}",
        f"it needs a device total of {format_bytes(closest.high)} (upper end of the "
        f"interval) of {format_bytes(closest.capacity)} on {where}: "
        f"{format_bytes(closest.missing)} too much",
        f"at the peak ({rank.moment}) the bytes are held by:",
    ]
    lines += [
        f"  {format_bytes(term.num_bytes):>12}  {term.name}"
        + (f"  ({term.because})" if term.because else "")
        for term in rank.terms[:8]
        if term.num_bytes
    ]
    lines.append("what would make it fit:")
    lines += [f"  - {cure}" for cure in _cures(closest, costs)]
    return "\n".join(lines)


def _cures(closest: Estimate, costs: Costs) -> list[str]:
    plan, found = closest.plan, []
    need = ceil(closest.high / 2**30)
    found.append(f"devices with at least {need} GiB each")
    found += _measures(closest, costs)
    found += _smaller_batch(plan, costs)
    found += _more_devices(plan, costs)
    found.append("a shorter sequence, or a smaller model")
    return found


def _measures(closest: Estimate, costs: Costs) -> list[str]:
    """Return the changes of the closest plan that make it fit, or the best of them."""
    saving = [
        measure
        for measure in find_measures(closest, costs)
        if measure.saved_device_total > 0
    ]
    fitting = [measure for measure in saving if measure.fits]
    return [
        f"{measure.name}: {format_bytes(measure.device_total.high)}, "
        f"{format_seconds(measure.seconds)} a step in place of "
        f"{format_seconds(closest.seconds)}"
        for measure in fitting
    ] or [
        f"not by itself, but most of all single changes: {measure.name} saves "
        f"{format_bytes(measure.saved_device_total)}"
        for measure in saving[:1]
    ]


def _smaller_batch(plan: Plan, costs: Costs) -> list[str]:
    if plan.local_batch == 1:
        return []
    least = replace(plan, micro_batch=1, accumulation=1)
    if any(violations(least, costs.model, costs.cluster)):
        return []
    estimate = predict(least, costs, spans=False)
    if not estimate.fits:
        return []
    batch = plan.mesh.data_parallel
    return [f"a global batch of {batch} (micro-batch 1): {format_bytes(estimate.high)}"]


def _more_devices(plan: Plan, costs: Costs) -> list[str]:
    """Return the first doubling of the cluster on which the same sharding fits."""
    factor = 1
    while plan.mesh.shard > 1 and factor < _LARGEST_FACTOR:
        factor *= 2
        mesh = replace(plan.mesh, shard=plan.mesh.shard * factor)
        cluster = replace(costs.cluster, num_nodes=costs.cluster.num_nodes * factor)
        wider = replace(plan, mesh=mesh, micro_batch=1, accumulation=1)
        estimate = predict(wider, Costs(costs.model, cluster), spans=False)
        if estimate.fits:
            return [
                f"{cluster.world} devices and a global batch of "
                f"{wider.global_batch}: {format_bytes(estimate.high)} each"
            ]
    return []
