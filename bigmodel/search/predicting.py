"""Predicting memory and time of one plan by simulating its shadow.

[Note: Few micro-batches stand for many]
Micro-batches repeat. A step without stages is written with at most three, the first,
one in the middle and the last; the seconds of the others are the difference that one
makes. A pipeline is written with four rounds of its stages, and the difference of one
round is that of `stages` micro-batches.

[Note: What the allocator reserves]
A replay on the allocator takes longer than the simulation itself, so a search leaves it
out until it has candidates for the end. Without it reserved bytes are those allocated,
which is the least they can be: a plan that does not fit then does not fit at all.

Ranks of one stage differ in the gradients that they own. The one with the highest peak
is replayed, and the others are taken to cache as much. Devices of one process do
different things, and each is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigmodel.backends.catalog import BACKENDS
from bigmodel.errors import UsageError, raise_if_any
from bigmodel.plans import Plan
from bigmodel.search.capacity import (
    cached_term,
    intervals,
    outside_terms,
    workspace_terms,
    workspaces,
)
from bigmodel.search.prediction import Estimate, RankMemory, Term, UnitMemory
from bigmodel.search.reasons import because
from bigmodel.search.rules import violations
from bigmodel.simulator import Costs, Program, Replayed, Timeline, replay, simulate
from bigmodel.simulator.unit_holdings import NO_UNIT, holdings_by_unit


def predict(
    plan: Plan, costs: Costs, *, spans: bool = True, replays: bool = True
) -> Estimate:
    """Return the predicted memory and time of a plan.

    Args:
        plan: Valid for the model and the cluster.
        costs: Of the model on the cluster; share it between plans.
        spans: Whether the timelines are to say when every task runs, and the ranks
            which units hold their bytes.
        replays: Whether the allocator is replayed. If not, reserved bytes are the least
            that they can be, see [Note: What the allocator reserves].

    Raises:
        UsageError: The plan breaks rules; lists all of them.
    """
    raise_if_any(list(violations(plan, costs.model, costs.cluster)), UsageError)
    programs, timelines, seconds = _simulate(plan, costs, spans)
    replayed = _replayed(plan, costs, programs, timelines) if replays else {}
    ranks = tuple(
        _memory(plan, costs, program, index, timeline, replayed.get(index), spans)
        for index, (program, timeline) in enumerate(
            zip(programs, timelines, strict=True)
        )
    )
    totals = [rank.intervals[-1] for rank in ranks]
    model, cluster = costs.model, costs.cluster
    samples = plan.global_batch / seconds
    slowest = max(timelines, key=lambda timeline: timeline.busy["compute"])
    # Its own end may come before that of the step.
    written = max(timeline.seconds for timeline in timelines)
    compute = slowest.busy["compute"] / written * seconds
    peak = cluster.device.peaks[plan.number_format.compute]
    return Estimate(
        plan=plan,
        ranks=ranks,
        capacity=cluster.device.memory,
        low=max(interval.low for interval in totals),
        high=max(interval.high for interval in totals),
        seconds=seconds,
        compute_seconds=compute,
        exposed_seconds=seconds - compute,
        tokens_per_second_per_gpu=samples * model.tokens_per_sample / plan.num_devices,
        mfu=samples * model.flops_per_sample / (plan.num_devices * peak),
        timelines=timelines,
    )


def _simulate(
    plan: Plan, costs: Costs, spans: bool
) -> tuple[tuple[Program, ...], tuple[Timeline, ...], float]:
    """Return programs, their timelines, and the seconds of a whole step.

    See [Note: Few micro-batches stand for many].
    """
    backend = BACKENDS.get(plan.backend)
    stages = plan.mesh.pipeline
    repeat = stages if stages > 1 else 1
    written = min(plan.accumulation, 4 * stages if stages > 1 else 3)
    if stages == 1 and plan.stages is not None and plan.stages.schedule == "gpipe":
        # On the devices of one process. All micro-batches are kept at the turn.
        written = plan.accumulation
    programs = backend.programs(plan, costs, written)
    timelines = simulate(programs, spans=spans)
    seconds = max(timeline.seconds for timeline in timelines)
    rest = plan.accumulation - written
    if rest:
        fewer = backend.programs(plan, costs, written - repeat)
        shorter = simulate(fewer, spans=False)
        before = max(timeline.seconds for timeline in shorter)
        seconds += rest * (seconds - before) / repeat
    return programs, timelines, seconds


def _replayed(
    plan: Plan,
    costs: Costs,
    programs: Sequence[Program],
    timelines: Sequence[Timeline],
) -> dict[int, tuple[int, Replayed]]:
    """Return, by program, the peak of tensors and the replay that stand for it.

    See [Note: What the allocator reserves].
    """
    if costs.cluster.device.kind == "cpu":
        return {}
    alike: dict[int, list[int]] = {}
    for index, program in enumerate(programs):
        ranks = program.ranks or plan.mesh.stage_ranks(index)
        key = plan.mesh.stage(ranks[0]) if plan.devices_per_process == 1 else index
        alike.setdefault(key, []).append(index)
    found: dict[int, tuple[int, Replayed]] = {}
    for members in alike.values():
        fullest = max(members, key=lambda index: timelines[index].peak.num_bytes)
        peak = timelines[fullest].peak.num_bytes
        run = replay(programs[fullest], workspaces=workspaces(costs.cluster))
        found |= dict.fromkeys(members, (peak, run))
    return found


def _memory(
    plan: Plan,
    costs: Costs,
    program: Program,
    index: int,
    timeline: Timeline,
    replayed: tuple[int, Replayed] | None,
    by_unit: bool,
) -> RankMemory:
    ranks = program.ranks or plan.mesh.stage_ranks(index)
    peak = timeline.peak
    tensors = tuple(
        Term(name=holder, num_bytes=count, because=because(holder, plan, costs.model))
        for holder, count in peak.holders
    )
    inside = workspace_terms(costs.cluster)
    spaces = sum(term.num_bytes for term in inside)
    cached: tuple[Term, ...] = ()
    if replayed is not None:
        cached = (cached_term(replayed[0] + spaces, replayed[1]),)
    outside = outside_terms(plan, costs.cluster)
    allocated = peak.num_bytes + spaces
    reserved = allocated + sum(term.num_bytes for term in cached)
    device_total = reserved + sum(term.num_bytes for term in outside)
    terms = (*tensors, *inside, *cached, *outside)
    return RankMemory(
        stage=plan.mesh.stage(ranks[0]),
        ranks=ranks,
        allocated=allocated,
        reserved=reserved,
        device_total=device_total,
        moment=peak.moment,
        terms=tuple(sorted(terms, key=lambda term: -term.num_bytes)),
        intervals=intervals(plan, costs.cluster, allocated, reserved, device_total),
        units=_units(program, timeline, inside) if by_unit else (),
        host=sum(count for _, count in program.host),
        disk=sum(count for _, count in program.disk),
    )


def _units(
    program: Program, timeline: Timeline, workspaces: Sequence[Term]
) -> tuple[UnitMemory, ...]:
    """Return what every unit holds at the peak; workspaces are no unit's."""
    rows = dict(holdings_by_unit(program, timeline.peak))
    beside = rows.pop(NO_UNIT, ())
    beside += tuple((term.name, term.num_bytes) for term in workspaces)
    ranked = tuple(sorted(beside, key=lambda held: (-held[1], held[0])))
    found = [*rows.items(), (NO_UNIT, ranked)] if ranked else rows.items()
    return tuple(UnitMemory(unit=name, holders=held) for name, held in found)
