"""Decisions and estimates as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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
        estimate_report(decision.best),
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


def estimate_report(estimate: Estimate) -> RenderableType:
    """Return the memory of an estimate's fullest rank, term by term, and its time."""
    rank = estimate.fullest
    return Group(
        Text(estimate.plan.describe(), style="bold"),
        Text(_verdict(estimate), style="green" if estimate.fits else "red"),
        Text(
            f"allocated {format_bytes(rank.allocated)}, "
            f"reserved {format_bytes(rank.reserved)}, "
            f"device total {format_bytes(rank.device_total)} "
            f"(likely {format_bytes(estimate.low)} to {format_bytes(estimate.high)})"
        ),
        Text(f"fullest {_whose(estimate, rank)}, at its peak during: {rank.moment}"),
        _terms_table(rank),
        *_stages(estimate),
        Text(
            f"step {format_seconds(estimate.seconds)}: "
            f"computing {format_seconds(estimate.compute_seconds)}, "
            f"waiting {format_seconds(estimate.exposed_seconds)}; "
            f"{estimate.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
            f"MFU {estimate.mfu:.1%}"
        ),
    )


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


def _whose(estimate: Estimate, rank: RankMemory) -> str:
    if len(estimate.ranks) == 1:
        return "rank: all are equal"
    return f"stage {rank.stage} (ranks {format_ranges(rank.ranks)})"


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
