"""Decisions and estimates as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigmodel.reports.memory_chart import draw_memory_chart
from bigmodel.reports.unit_rows import unit_rows
from bigmodel.search.decision import Decision
from bigmodel.search.prediction import Estimate, RankMemory
from bigmodel.search.rejections import Rejected, group_rejected
from bigmodel.units import format_bytes, format_ranges, format_seconds


def decision_report(decision: Decision) -> RenderableType:
    """Return the plans that fit, the chosen one's memory, and the rejected ones."""
    found = 1 + len(decision.runners_up)
    head = Text(
        f"{decision.model} on {decision.cluster}, global batch "
        f"{decision.global_batch}: {decision.considered} plans considered, "
        f"{decision.simulated} simulated, the best {found} that fit:"
    )
    parts: list[RenderableType] = [
        head,
        plans_table((decision.best, *decision.runners_up)),
        estimate_summary(decision.best),
    ]
    if decision.rejected:
        parts.append(rejected_table(decision.rejected))
    return Group(*parts)


def plans_table(estimates: Iterable[Estimate]) -> Table:
    """Return a table with one plan a row, in the order given."""
    table = _table("#", "plan", "step", "tokens/s/GPU", "MFU", "memory of fullest rank")
    for column in table.columns[2:]:
        column.justify = "right"
    for number, estimate in enumerate(estimates, start=1):
        rank = estimate.fullest
        _row(
            table,
            str(number),
            estimate.plan.describe(),
            format_seconds(estimate.seconds),
            f"{estimate.tokens_per_second_per_gpu:,.0f}",
            f"{estimate.mfu:.1%}",
            f"{format_bytes(rank.allocated)} allocated\n"
            f"{format_bytes(rank.reserved)} reserved\n"
            f"{format_bytes(rank.device_total)} of {format_bytes(estimate.capacity)}",
            style="bold" if number == 1 else "",
        )
    return table


def estimate_report(estimate: Estimate, rank: int | None = None) -> RenderableType:
    """Return the whole explanation of one rank's memory.

    Args:
        estimate: What was predicted.
        rank: Which rank; None: the fullest.

    Raises:
        UsageError: The plan has no such rank.
    """
    shown = estimate.of_rank(rank)
    parts = [estimate_summary(estimate, rank)]
    timeline = estimate.timeline_of(shown)
    chart = draw_memory_chart(timeline) if timeline else None
    if chart is not None:
        said = "bytes of tensors in the order of issue; ▼ the peak; a few micro-batches"
        parts += [Text(f"\n{said} stand for all", style="dim"), chart]
    if shown.units:
        parts.append(units_table(shown))
    if estimate.measures:
        parts.append(measures_table(estimate))
    return Group(*parts)


def estimate_summary(estimate: Estimate, rank: int | None = None) -> RenderableType:
    """Return the memory of one rank, term by term, and the time of a step.

    Args:
        estimate: What was predicted.
        rank: Which rank; None: the fullest.

    Raises:
        UsageError: The plan has no such rank.
    """
    shown = estimate.of_rank(rank)
    whose = _whose(estimate, shown, rank)
    return Group(
        Text(estimate.plan.describe(), style="bold"),
        Text(_verdict(estimate), style="green" if estimate.fits else "red"),
        Text(f"{whose}, at its peak during: {shown.moment}"),
        _numbers_table(shown),
        _terms_table(shown),
        *_stages(estimate),
        Text(
            f"step {format_seconds(estimate.seconds)}: "
            f"computing {format_seconds(estimate.compute_seconds)}, "
            f"waiting {format_seconds(estimate.exposed_seconds)}; "
            f"{estimate.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
            f"MFU {estimate.mfu:.1%}"
        ),
    )


def units_table(rank: RankMemory) -> Table:
    """Return what each unit holds at the peak; equal neighbours share a row."""
    table = _table("allocated", "of each", "unit", "held as")
    for column in table.columns[:2]:
        column.justify = "right"
    for row in unit_rows(rank.units):
        each = f"{row.count} x {format_bytes(row.each)}" if row.count > 1 else ""
        _row(table, format_bytes(row.num_bytes), each, row.name, row.holders)
    return table


def measures_table(estimate: Estimate) -> RenderableType:
    """Return what would save memory, simulated; what would not, in a line."""
    table = _table("saves", "of allocated", "step then", "fits", "by")
    for column in table.columns[:3]:
        column.justify = "right"
    saving = [m for m in estimate.measures if m.saved_device_total > 0]
    for measure in saving:
        _row(
            table,
            format_bytes(measure.saved_device_total),
            format_bytes(measure.saved_allocated),
            format_seconds(measure.seconds),
            "yes" if measure.fits else "no",
            measure.name,
        )
    others = [m.name for m in estimate.measures if m.saved_device_total <= 0]
    parts: list[RenderableType] = [table] if saving else []
    if others:
        said = "no lower device total by: " + "; ".join(others)
        parts.append(Text(said, style="dim"))
    return Group(*parts)


def rejected_table(rejected: Iterable[Rejected]) -> Table:
    """Return a table of the reasons why plans were rejected, with an example each."""
    table = _table("rejected", "reason", "for example")
    table.columns[0].justify = "right"
    for group in group_rejected(rejected):
        example = group.example.plan.describe()
        _row(table, str(group.count), group.reason, example)
    return table


def _verdict(estimate: Estimate) -> str:
    capacity, high = format_bytes(estimate.capacity), format_bytes(estimate.high)
    if estimate.fits:
        left = format_bytes(estimate.capacity - estimate.high)
        return (
            f"fits: the device total is at most {high} (upper end of its interval) of "
            f"{capacity}; {left} are left"
        )
    return (
        f"does not fit: the device total can be {high} (upper end of its interval), "
        f"{format_bytes(estimate.missing)} more than {capacity}"
    )


def _whose(estimate: Estimate, shown: RankMemory, rank: int | None) -> str:
    alike = f"stage {shown.stage} (ranks {format_ranges(shown.ranks)})"
    if rank is not None:
        return f"rank {rank} of {alike}"
    if len(estimate.ranks) == 1:
        return "fullest rank: all are equal"
    return f"fullest {alike}"


def _numbers_table(rank: RankMemory) -> Table:
    table = _table("", "likely", "at least", "at most")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, interval in rank.numbers.items():
        ends = (interval.likely, interval.low, interval.high)
        _row(table, name.replace("_", " "), *map(format_bytes, ends))
    return table


def _terms_table(rank: RankMemory) -> Table:
    table = _table("bytes", "share", "held by", "because")
    for column in table.columns[:2]:
        column.justify = "right"
    for term in rank.terms:
        _row(
            table,
            format_bytes(term.num_bytes),
            f"{term.num_bytes / rank.device_total:.0%}",
            term.name,
            term.because,
        )
    return table


def _stages(estimate: Estimate) -> list[RenderableType]:
    if len(estimate.ranks) == 1:
        return []
    table = _table(
        "stage", "ranks", "allocated", "reserved", "device total", "peak during"
    )
    for rank in estimate.ranks:
        _row(
            table,
            str(rank.stage),
            format_ranges(rank.ranks),
            format_bytes(rank.allocated),
            format_bytes(rank.reserved),
            format_bytes(rank.device_total),
            rank.moment,
        )
    return [table]


def _row(table: Table, *cells: str, style: str = "") -> None:
    # As Text: a plan's [shard 8] is no markup.
    table.add_row(*map(Text, cells), style=style)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
