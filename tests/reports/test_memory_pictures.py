"""The step's memory as characters, and units in rows."""

from __future__ import annotations

from bigmodel.reports.memory_chart import HEIGHT, WIDTH, draw_memory_chart
from bigmodel.reports.memory_columns import highest, runs, thin
from bigmodel.reports.unit_rows import unit_rows
from bigmodel.search.prediction import UnitMemory
from bigmodel.simulator import ProgramBuilder, Task, Timeline, simulate
from bigmodel.units import GIB, MIB


def timeline(repeat: int) -> Timeline:
    """Return a step whose memory rises to 4 GiB and falls, with a spike of 6 GiB."""
    builder = ProgramBuilder()
    for index in range(4 * repeat):
        size = ("activations", GIB // repeat)
        builder.add(Task(label=f"forward {index}", change=(size,)))
    builder.add(
        Task(label="backward", change=(("activations", 0),), surge=(("x", 2 * GIB),))
    )
    for index in range(4 * repeat):
        size = ("activations", -GIB // repeat)
        builder.add(Task(label=f"backward {index}", change=(size,)))
    builder.add(Task(label="optimizer step"))
    (found,) = simulate([builder.build()])
    return found


def test_the_chart_has_the_curve_the_peak_and_the_phases():
    # 1, 2, 3, 4, 6, 4, 3, 2, 1, 0 GiB on 8 rows of 0.75 GiB.
    picture = draw_memory_chart(timeline(1))
    assert picture is not None

    def row(scale: str, columns: str) -> str:
        return scale + "".join(WIDTH // 10 * mark for mark in columns)

    assert picture.plain.splitlines() == [
        row(" " * 14, "    ") + "▼",
        row("    6.00 GiB ┤", "    █"),
        row("             │", "    █"),
        row("             │", "   ▃█▃"),
        row("             │", "   ███"),
        row("             │", "  █████"),
        row("             │", " ▅█████▅"),
        row("             │", "▃███████▃"),
        row("             │", "█████████"),
        row("         0 B └", "──────────"),
        " " * 14 + f"{'│forward':32}{'│backward':40}{'│optimiz':8}",
    ]


def test_thinning_keeps_the_peak_whatever_the_width():
    line = timeline(128)
    for most in (7, WIDTH, 500, 5000):
        columns = thin(line, most)
        assert len(columns) == min(most, len(line.spans))
        assert columns[highest(columns)].live == line.peak.num_bytes == 6 * GIB
        assert [run.name for run in runs(columns)][:2] == ["forward", "backward"]
        assert sum(run.end - run.begin for run in runs(columns)) == len(columns)
    picture = draw_memory_chart(line)
    assert picture is not None
    assert max(map(len, picture.plain.splitlines())) <= WIDTH + 14
    assert len(picture.plain.splitlines()) == HEIGHT + 3


def test_without_tasks_there_is_no_picture():
    (bare,) = simulate([ProgramBuilder().build()])
    assert draw_memory_chart(bare) is None


def test_equal_neighbours_share_a_row():
    alike = (("weights", 3 * MIB), ("activations", MIB))
    units = [
        UnitMemory(unit="(before the blocks)", holders=(("weights", 5 * MIB),)),
        *(UnitMemory(unit=f"model.layers.{n}", holders=alike) for n in range(7)),
        UnitMemory(unit="model.layers.7", holders=(*alike, ("gradients", MIB))),
        *(UnitMemory(unit=f"model.layers.{n}", holders=alike) for n in (8, 9)),
        UnitMemory(unit="", holders=(("batch", 8 * MIB), ("buffers", 100))),
    ]
    rows = unit_rows(units)
    assert [(row.name, row.count) for row in rows] == [
        ("(before the blocks)", 1),
        ("model.layers.0 to 6", 7),
        ("model.layers.7", 1),
        ("model.layers.8 to 9", 2),
        ("of no single unit", 1),
    ]
    assert sum(row.num_bytes for row in rows) == sum(u.num_bytes for u in units)
    assert rows[1].holders == "weights 3.00 MiB, activations 1.00 MiB"
    assert rows[-1].holders == "batch 8.00 MiB, others 100 B"
