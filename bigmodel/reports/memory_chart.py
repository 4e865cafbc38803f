"""Live bytes over one step as block characters for a terminal.

12.3 GiB ┤          ▼
         │       ▃▆██▇▅▂
         │  ▁▃▅▇████████▆▄▂
     0 B └─────────────────────
          │forward │backward│optimizer
"""

from __future__ import annotations

from rich.text import Text

from bigmodel.reports.memory_columns import highest, runs, thin
from bigmodel.simulator import Timeline
from bigmodel.units import format_bytes

WIDTH = 84
"""Columns of the picture, beside its scale."""
HEIGHT = 8
_SCALE = 12
_BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_memory_chart(timeline: Timeline) -> Text | None:
    """Return the picture, or None where the timeline does not say what ran."""
    columns = thin(timeline, WIDTH)
    if not columns:
        return None
    # A short step is drawn with broad columns.
    breadth = WIDTH // len(columns)
    columns = tuple(column for column in columns for _ in range(breadth))
    peak = highest(columns)
    top = columns[peak].live or 1
    eighths = [round(8 * HEIGHT * column.live / top) for column in columns]
    lines = [" " * (_SCALE + 2) + " " * peak + "▼"]
    for row in reversed(range(HEIGHT)):
        scale = f"{format_bytes(top):>{_SCALE}} ┤" if row == HEIGHT - 1 else ""
        cells = (_BLOCKS[min(max(high - 8 * row, 0), 8)] for high in eighths)
        lines.append((scale or " " * _SCALE + " │") + "".join(cells).rstrip())
    lines.append(f"{'0 B':>{_SCALE}} └" + "─" * len(columns))
    marks = (
        f"│{run.name}"[: run.end - run.begin].ljust(run.end - run.begin)
        for run in runs(columns)
    )
    lines.append(" " * (_SCALE + 2) + "".join(marks))
    return Text("\n".join(lines), no_wrap=True, overflow="crop")
