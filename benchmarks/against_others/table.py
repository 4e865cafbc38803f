"""The comparison as people read it: in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.against_others.comparison import Cell, Row, Summary, summarise
from benchmarks.against_others.estimator import Estimator, Reason
from bigmodel.units import MIB

Table = list[list[str]]
"""Rows of cells; the first is the head."""


def cases_table(rows: Sequence[Row]) -> Table:
    """Return error and seconds of every tool for every case."""
    tools = list(rows[0].cells)
    return [
        ["case", "measured MiB", *tools],
        *(
            [row.case, f"{row.measured / MIB:.3f}", *map(_cell, row.cells.values())]
            for row in rows
        ),
    ]


def summary_table(rows: Sequence[Row]) -> Table:
    """Return a row for every tool, and one more for the cases within its premises."""
    head = ["tool", "cases", "median |error|", "largest", "deepest under-estimate"]
    table = [[*head, "median seconds"]]
    for name in rows[0].cells:
        cells = [row.cells[name] for row in rows]
        table += _figures(name, summarise(cells))
        within = [cell for cell in cells if cell.within]
        if any(cell.error is not None and not cell.within for cell in cells):
            table += _figures(f"{name}, without ~", summarise(within))
    return table


def layouts_table(rows: Sequence[Row]) -> Table:
    """Return the median size of the error of every tool under every layout."""
    layouts = list(dict.fromkeys(row.case.split()[1] for row in rows))
    table = [["median |error|", *layouts]]
    for name in rows[0].cells:
        line = [name]
        for layout in layouts:
            cells = [r.cells[name] for r in rows if r.case.split()[1] == layout]
            found = summarise(cells)
            line.append("-" if found is None else f"{found.median:.2%}")
        table.append(line)
    return table


def legend(rows: Sequence[Row], tools: Sequence[Estimator]) -> list[str]:
    """Return what tools count, why some say nothing, and what they are not for."""
    lines = []
    for tool in tools:
        cells = [row.cells[tool.name] for row in rows]
        line = f"{tool.name}: {tool.counts}"
        for mark, said in (("-", _reason), ("~", _outside)):
            texts = list(dict.fromkeys(text for text in map(said, cells) if text))
            if texts:
                line += f"; {mark} {', '.join(texts)}"
        lines.append(line)
    return lines


def plain(table: Table) -> str:
    """Return a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if index else text.ljust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    )


def markdown(table: Table) -> str:
    """Return a table for a page."""
    # A bar would end the cell.
    head, *body = [[text.replace("|", "\\|") for text in line] for line in table]
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def _cell(cell: Cell) -> str:
    if cell.error is None:
        return "-"
    mark = "" if cell.within else "~"
    return f"{mark}{cell.error:+.2%} {cell.seconds:.2f} s"


def _figures(name: str, found: Summary | None) -> Table:
    if found is None:
        return [[name, "0", *["-"] * 4]]
    shares = (found.median, found.largest, found.deepest_under_estimate)
    figures = [f"{share:.2%}" for share in shares]
    return [[name, str(found.cases), *figures, f"{found.seconds:.2f}"]]


def _reason(cell: Cell) -> str:
    return cell.answer.text if isinstance(cell.answer, Reason) else ""


def _outside(cell: Cell) -> str:
    return "" if isinstance(cell.answer, Reason) else cell.answer.outside
