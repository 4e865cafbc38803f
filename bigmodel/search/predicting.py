"""Predicting memory and time of one plan by simulating its shadow.

[Note: Few micro-batches stand for many]
Micro-batches repeat. A step without stages is written with at most three, the first,
one in the middle and the last; the seconds of the others are the difference that one
makes. A pipeline is written with four rounds of its stages, and the difference of one
round is that of `stages` micro-batches.
"""

from __future__ import annotations

from bigmodel.backends.catalog import BACKENDS
from bigmodel.errors import UsageError, raise_if_any
from bigmodel.plans import Plan
from bigmodel.search.capacity import HIGH, LOW, outside_terms, reserved_terms
from bigmodel.search.prediction import Estimate, RankMemory, Term
from bigmodel.search.reasons import because
from bigmodel.search.rules import violations
from bigmodel.simulator import Costs, Program, Timeline, simulate


def predict(plan: Plan, costs: Costs, *, spans: bool = True) -> Estimate:
    """Return the predicted memory and time of a plan.

    Args:
        plan: Valid for the model and the cluster.
        costs: Of the model on the cluster; share it between plans.
        spans: Whether the timelines are to say when every task runs.

    Raises:
        UsageError: The plan breaks rules; lists all of them.
    """
    raise_if_any(list(violations(plan, costs.model, costs.cluster)), UsageError)
    programs, timelines, seconds = _simulate(plan, costs, spans)
    ranks = tuple(
        _memory(plan, costs, program, index, timeline)
        for index, (program, timeline) in enumerate(
            zip(programs, timelines, strict=True)
        )
    )
    total = max(rank.device_total for rank in ranks)
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
        low=int(total * LOW),
        high=int(total * HIGH),
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


def _memory(
    plan: Plan, costs: Costs, program: Program, index: int, timeline: Timeline
) -> RankMemory:
    ranks = program.ranks or plan.mesh.stage_ranks(index)
    peak = timeline.peak
    base = sum(count for _, count in timeline.base)
    tensors = tuple(
        Term(name=holder, num_bytes=count, because=because(holder, plan, costs.model))
        for holder, count in peak.holders
    )
    cached = reserved_terms(costs.cluster, max(peak.num_bytes - base, 0))
    outside = outside_terms(plan, costs.cluster)
    reserved = peak.num_bytes + sum(term.num_bytes for term in cached)
    terms = sorted((*tensors, *cached, *outside), key=lambda t: -t.num_bytes)
    return RankMemory(
        stage=plan.mesh.stage(ranks[0]),
        ranks=ranks,
        allocated=peak.num_bytes,
        reserved=reserved,
        device_total=reserved + sum(term.num_bytes for term in outside),
        moment=peak.moment,
        terms=tuple(terms),
        host=sum(count for _, count in program.host),
        disk=sum(count for _, count in program.disk),
    )
