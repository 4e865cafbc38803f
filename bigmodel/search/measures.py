"""What would save memory: the neighbours of a plan, each predicted like the plan.

A neighbour trains the same model with the same global batch and differs in one thing:
what is recomputed, what is sharded, the micro-batch, what lies in the machine's memory,
the optimizer, the precision. What the backend refuses, for this model or cluster, is no
neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bigmodel.backends.catalog import BACKENDS
from bigmodel.errors import InvalidPlanError
from bigmodel.models import OPTIMIZERS
from bigmodel.plans import Plan, Precision
from bigmodel.plans.training_plan import RECOMPUTE_POLICIES
from bigmodel.search.predicting import predict
from bigmodel.search.prediction import Estimate, Measure
from bigmodel.search.rules import dtype_violations, violations
from bigmodel.simulator import Costs

Change = tuple[str, Plan]
"""What is changed, in words, and the changed plan."""

_LEANER: dict[str, tuple[Precision, ...]] = {
    "fp32": ("autocast", "bf16"),
    "autocast": ("bf16",),
    "autocast-fp16": ("fp16",),
}
"""Precisions that keep less for the backward than another one."""

_DDP, _STATES, _GRADIENTS, _WEIGHTS = range(4)
"""What data-parallel ranks shard, each with all before it; numbered like ZeRO."""


def find_measures(
    estimate: Estimate,
    costs: Costs,
    *,
    retraced: Callable[[Precision], Costs] | None = None,
) -> tuple[Measure, ...]:
    """Return what each neighbour of a plan saves, the largest saving first.

    Args:
        estimate: Of the plan, with the allocator replayed.
        costs: Those that it was predicted with.
        retraced: Returns the costs of the model in another precision; None: precisions
            are not tried.
    """
    plan = estimate.plan
    found = [
        _measured(name, changed, estimate, costs)
        for name, changed in neighbours(plan, costs)
    ]
    if retraced is not None:
        for precision in _LEANER.get(plan.precision, ()):
            if any(dtype_violations(precision, costs.cluster)):
                continue
            leaner = retraced(precision)
            found += [
                _measured(f"precision {precision}", changed, estimate, leaner)
                for changed in _accepted(plan, leaner, precision=precision)
            ]
    return tuple(sorted(found, key=lambda measure: -measure.saved_device_total))


def neighbours(plan: Plan, costs: Costs) -> Iterator[Change]:
    """Yield every change of one thing that the backend accepts."""
    yield from _recomputing(plan, costs)
    yield from _sharding(plan, costs)
    yield from _smaller_micro_batch(plan, costs)
    yield from _offloading(plan, costs)
    yield from _leaner_optimizer(plan, costs)


def _measured(name: str, plan: Plan, before: Estimate, costs: Costs) -> Measure:
    after = predict(plan, costs, spans=False)
    was, now = before.fullest, after.fullest
    return Measure(
        name=name,
        plan=plan,
        saved_allocated=was.allocated - now.allocated,
        saved_device_total=was.device_total - now.device_total,
        device_total=now.intervals[-1],
        seconds=after.seconds,
        fits=after.fits,
    )


def _recomputing(plan: Plan, costs: Costs) -> Iterator[Change]:
    """Yield every policy that keeps less, and `full` for every second unit."""
    count = len(plan.units)
    keeps_most = min(
        map(RECOMPUTE_POLICIES.index, plan.recompute or ("none",)), default=0
    )
    half = tuple("full" if index % 2 else "none" for index in range(count))
    choices = [
        (f"recompute {policy}, all units", (policy,) * count)
        for policy in RECOMPUTE_POLICIES[keeps_most + 1 :]
    ]
    if not any(policy != "none" for policy in plan.recompute):
        choices.insert(0, ("recompute full, every second unit", half))
    for name, policies in choices:
        if count and policies != plan.recompute:
            for changed in _accepted(plan, costs, recompute=policies):
                yield name, changed


def _sharding(plan: Plan, costs: Costs) -> Iterator[Change]:
    """Yield layouts that shard more things, or the same ones over more ranks.

    Those of the plan's own backend; a stage that it lacks is looked for in the others.
    """
    level = _level(plan)
    for wanted in range(level, _WEIGHTS + 1):
        own = _layouts(plan.backend, plan, costs, wanted)
        if wanted == level:
            own = [each for each in own if each.mesh.shard > plan.mesh.shard]
        names = [name for name, backend in BACKENDS if backend.offered]
        others = [] if own or wanted == level else names
        found = own or [
            layout
            for name in others
            if name != plan.backend
            for layout in _layouts(name, plan, costs, wanted)
        ]
        for layout in found:
            for changed in _accepted(plan, costs, **_what_shards(layout, plan)):
                yield _shards_in_words(changed), changed


def _level(plan: Plan) -> int:
    if plan.zero_stage:
        return plan.zero_stage
    if plan.mesh.shard == 1:
        return _DDP
    keeps = plan.fsdp2.reshard_after_forward is False
    return _GRADIENTS if keeps else _WEIGHTS


def _layouts(name: str, plan: Plan, costs: Costs, level: int) -> list[Plan]:
    """Return the backend's layout of this level that shards over most ranks."""
    alike = [
        layout
        for layout in BACKENDS.get(name).layouts(costs)
        if _level(layout) == level
        and layout.mesh.pipeline == plan.mesh.pipeline
        and layout.devices_per_process == plan.devices_per_process
        and _schedule(layout) == _schedule(plan)
        and layout.offload.parameters == "device"
    ]
    return [max(alike, key=lambda layout: layout.mesh.shard)] if alike else []


def _schedule(plan: Plan) -> str | None:
    return plan.stages.schedule if plan.stages else None


def _what_shards(layout: Plan, plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that say what is sharded, as in a layout."""
    fields = {"mesh": layout.mesh, "zero_stage": layout.zero_stage}
    if layout.backend == plan.backend:
        reshard = layout.fsdp2.reshard_after_forward
        return fields | {"fsdp2": replace(plan.fsdp2, reshard_after_forward=reshard)}
    blocks = ("ddp", "fsdp2", "deepspeed", "fairscale", "horovod")
    return fields | {name: getattr(layout, name) for name in ("backend", *blocks)}


def _shards_in_words(plan: Plan) -> str:
    words = [plan.backend]
    if plan.zero_stage:
        words.append(f"ZeRO-{plan.zero_stage}")
    else:
        keeps = plan.fsdp2.reshard_after_forward is False
        words.append("no reshard" if keeps else "reshard")
    return f"{' '.join(words)} [{plan.mesh}]"


def _smaller_micro_batch(plan: Plan, costs: Costs) -> Iterator[Change]:
    """Yield half the micro-batch; where it is odd, the largest part that divides it."""
    size = plan.micro_batch
    smaller = next((n for n in range(size // 2, 0, -1) if size % n == 0), None)
    if smaller is None:
        return
    accumulation = plan.accumulation * size // smaller
    changes = {"micro_batch": smaller, "accumulation": accumulation}
    for changed in _accepted(plan, costs, **changes):
        yield f"micro-batch {smaller} x {accumulation}", changed


def _offloading(plan: Plan, costs: Costs) -> Iterator[Change]:
    """Yield states and activations kept in the machine's memory."""
    choices: Sequence[tuple[str, ...]] = (
        ("optimizer",),
        ("optimizer", "parameters"),
        ("activations",),
    )
    for kinds in choices:
        moved = {k: "cpu" for k in kinds if getattr(plan.offload, k) == "device"}
        if not moved:
            continue
        tiers = replace(plan.offload, **moved)
        for changed in _accepted(plan, costs, offload=tiers):
            yield f"{' and '.join(kinds)} on cpu", changed


def _leaner_optimizer(plan: Plan, costs: Costs) -> Iterator[Change]:
    """Yield optimizers that keep fewer states."""
    shapes = costs.model.trained_shapes
    most = OPTIMIZERS.get(plan.optimizer).kept_elements(shapes)
    for name, row in OPTIMIZERS:
        if row.kept_elements(shapes) < most:
            for changed in _accepted(plan, costs, optimizer=name):
                yield f"optimizer {name}", changed


def _accepted(plan: Plan, costs: Costs, **changes: Any) -> Iterator[Plan]:
    """Yield the changed plan, unless a rule is against it."""
    try:
        changed = replace(plan, **changes)
    except InvalidPlanError:
        return
    if not any(violations(changed, costs.model, costs.cluster)):
        yield changed
