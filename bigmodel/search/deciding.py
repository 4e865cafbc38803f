"""Choosing the fastest plan that fits.

Plans are simulated in the order of their lower bound of time. The search ends when the
next bound is no better than the slowest of the plans that are kept: what is left cannot
be faster. Everything is deterministic; ties go to the plan that was enumerated first.
What the allocator reserves is replayed for the plans that are kept (`finalists.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigmodel.backends.catalog import BACKENDS
from bigmodel.clusters import Cluster
from bigmodel.errors import (
    InvalidPlanError,
    NothingFitsError,
    UnknownNameError,
    Violation,
    raise_if_any,
)
from bigmodel.models import OPTIMIZERS, ModelSpec
from bigmodel.plans import Plan, Precision
from bigmodel.search.bounds import Bounds
from bigmodel.search.decision import Decision
from bigmodel.search.finalists import Finalists
from bigmodel.search.predicting import predict
from bigmodel.search.prediction import Estimate
from bigmodel.search.rejections import Rejected
from bigmodel.search.rules import dtype_violations, violations
from bigmodel.search.shortfall import explain_shortfall
from bigmodel.search.space import Request, enumerate_plans
from bigmodel.simulator import Costs
from bigmodel.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    bound: float
    order: int
    plan: Plan


def decide(
    model: ModelSpec,
    cluster: Cluster,
    *,
    global_batch: int,
    optimizer: str = "adamw",
    precision: Precision = "bf16",
    backends: Sequence[str] | None = None,
    keep: int = 5,
) -> Decision:
    """Return the fastest plan that fits, and what became of the others.

    Args:
        model: Traced for the precision.
        cluster: All its devices are used.
        global_batch: Samples per optimizer step.
        optimizer: Name in the table of optimizers.
        precision: Of every plan.
        backends: Names of the backends to consider; None: all that
            are offered unasked.
        keep: How many plans to return, the best among them.

    Raises:
        UsageError: The request itself is wrong.
        NothingFitsError: No plan fits; says by how much and what would help.
    """
    costs = Costs(model, cluster)
    request = _checked(cluster, global_batch, optimizer, precision, backends)
    rejected: list[Rejected] = []
    bounds = Bounds(costs)
    candidates: list[_Candidate] = []
    for order, plan in enumerate(enumerate_plans(costs, request)):
        broken = next(violations(plan, model, cluster), None)
        if broken is not None:
            rejected.append(Rejected(plan=plan, reason=str(broken)))
            continue
        candidates.append(_Candidate(bounds.seconds(plan), order, plan))
    considered = len(rejected) + len(candidates)
    if not candidates:
        raise InvalidPlanError(_no_candidate(global_batch, cluster, rejected))
    kept, missed, simulated = _best_first(candidates, costs, bounds, keep, rejected)
    if not kept:
        raise NothingFitsError(explain_shortfall(missed, costs))
    return Decision(
        model=model.name,
        cluster=cluster.describe(),
        global_batch=global_batch,
        best=kept[0],
        runners_up=tuple(kept[1:]),
        rejected=tuple(rejected),
        considered=considered,
        simulated=simulated,
    )


def _best_first(
    candidates: list[_Candidate],
    costs: Costs,
    bounds: Bounds,
    keep: int,
    rejected: list[Rejected],
) -> tuple[list[Estimate], list[Estimate], int]:
    """Return the plans to keep, fastest first, those that do not fit, and a count."""
    # Pictures are drawn of the plans that are kept, so these are simulated in full.
    finalists = Finalists(keep, lambda plan: predict(plan, costs))
    missed: list[Estimate] = []
    hopeless: list[Plan] = []
    capacity = costs.cluster.device.memory
    simulated = 0
    for candidate in sorted(candidates):
        plan = candidate.plan
        if finalists.are_faster_than(candidate.bound):
            reason = _slower(candidate.bound, finalists.slowest)
            rejected.append(Rejected(plan=plan, reason=reason))
            continue
        least = bounds.memory(plan)
        if least > capacity:
            hopeless.append(plan)
            reason = (
                f"does not fit: weights and optimizer states alone are "
                f"{format_bytes(least)} of {format_bytes(capacity)}"
            )
            rejected.append(Rejected(plan=plan, reason=reason))
            continue
        estimate = predict(plan, costs, spans=False, replays=False)
        simulated += 1
        if estimate.fits:
            finalists.add(candidate.order, estimate)
        else:
            missed.append(estimate)
            rejected.append(_too_large(estimate))
    kept = finalists.best()
    missed += finalists.misfits
    rejected += [_too_large(estimate) for estimate in finalists.misfits]
    rejected += [
        Rejected(
            plan=estimate.plan,
            reason=f"takes {format_seconds(estimate.seconds)}, longer than those kept",
            estimate=estimate,
        )
        for estimate in finalists.others()
    ]
    if not kept and not missed:
        # Something must be said of the closest plan, however far it is.
        least = min(map(bounds.memory, hopeless))
        close = [plan for plan in hopeless if bounds.memory(plan) == least]
        smallest = min(plan.micro_batch for plan in close)
        missed += [
            predict(plan, costs, spans=False, replays=False)
            for plan in close
            if plan.micro_batch == smallest
        ]
    return kept, missed, simulated


def _too_large(estimate: Estimate) -> Rejected:
    return Rejected(
        plan=estimate.plan,
        reason=f"does not fit: {format_bytes(estimate.missing)} too much on stage "
        f"{estimate.fullest.stage}",
        estimate=estimate,
    )


def _slower(bound: float, slowest: float) -> str:
    return (
        f"computing alone takes {format_seconds(bound)}, longer than "
        f"{format_seconds(slowest)}"
    )


def _checked(
    cluster: Cluster,
    global_batch: int,
    optimizer: str,
    precision: Precision,
    backends: Sequence[str] | None,
) -> Request:
    found: list[Violation] = []
    if global_batch < 1:
        found.append(
            Violation(
                field="global_batch",
                got=global_batch,
                rule="it must be at least 1",
            )
        )
    if optimizer not in OPTIMIZERS:
        raise UnknownNameError("optimizer", optimizer, OPTIMIZERS.names())
    names = tuple(backends) if backends else _offered()
    for name in names:
        BACKENDS.get(name)
    found += dtype_violations(precision, cluster)
    raise_if_any(found, InvalidPlanError)
    return Request(
        global_batch=global_batch,
        optimizer=optimizer,
        precision=precision,
        backends=names,
    )


def _no_candidate(
    global_batch: int, cluster: Cluster, rejected: Sequence[Rejected]
) -> str | Violation:
    if rejected:
        reasons = dict.fromkeys(entry.reason for entry in rejected)
        return "no plan is possible: " + "; ".join(reasons)
    world = cluster.world
    near = max(world, round(global_batch / world) * world)
    return Violation(
        field="global_batch",
        got=global_batch,
        rule=f"no plan divides it among {world} devices",
        cure=f"use a multiple of {world}, such as {near}",
    )


def _offered() -> tuple[str, ...]:
    return tuple(name for name, backend in BACKENDS if backend.offered)
