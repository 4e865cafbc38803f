"""Asking, summing up and printing, with made-up tools."""

from __future__ import annotations

import json

import pytest

from benchmarks.against_others.__main__ import TOOLS, fullest, save
from benchmarks.against_others.comparison import (
    LAYOUTS,
    Cell,
    Row,
    ask,
    compared_cases,
    summarise,
)
from benchmarks.against_others.estimator import Estimator, Prediction, Reason
from benchmarks.against_others.table import (
    cases_table,
    layouts_table,
    legend,
    markdown,
    plain,
    summary_table,
)
from benchmarks.memory_accuracy.cases import cases
from bigmodel.units import MIB

CASES = list(compared_cases())


def constant(name: str, answer: Prediction | Reason) -> Estimator:
    return Estimator(name=name, counts="nothing", estimate=lambda case: answer)


EXACT = constant("exact", Prediction(allocated=4 * MIB))
LOW_ANSWER = Prediction(allocated=3 * MIB, outside="too large")
LOW = constant("low", LOW_ANSWER)
SILENT = constant("silent", Reason(text="cannot speak"))


def rows() -> list[Row]:
    made = (EXACT, LOW, SILENT)
    return [ask(CASES[0], 4 * MIB, made), ask(CASES[1], 2 * MIB, made)]


def cell(allocated: int, seconds: float = 1.0) -> Cell:
    answer = Prediction(allocated=allocated)
    return Cell(answer=answer, measured=100, seconds=seconds)


def test_every_layout_is_there_for_both_models_with_one_micro_batch():
    assert {case.plan.accumulation for case in CASES} == {1}
    seen = {tuple(case.name.split()[:3]) for case in CASES}
    for model in ("gpt", "mlp"):
        for layout in LAYOUTS:
            for recompute in ("none", "full"):
                assert (model, layout, recompute) in seen
    assert {case.plan.precision for case in CASES} == {"fp32", "bf16", "autocast"}


def test_only_these_cases_are_measured():
    names = [case.name for case in CASES]
    assert [case.name for case in cases(quick=False, only=names)] == names


def test_measured_is_the_fullest_rank():
    assert fullest([{"a": {"peak": 3}}, {"a": {"peak": 5}}], "a") == 5


def test_the_second_answer_counts():
    asked = []

    def answer(case):
        asked.append(case)
        return Prediction(allocated=len(asked))

    tool = Estimator(name="counter", counts="", estimate=answer)
    row = ask(CASES[0], 4, [tool])
    assert asked == [CASES[0]] * 2
    assert row.cells["counter"].answer == Prediction(allocated=2)
    assert row.cells["counter"].error == -0.5


def test_a_summary_by_hand():
    found = summarise([cell(120, 1.0), cell(90, 2.0), cell(100, 9.0)])
    assert found.cases == 3
    assert found.median == pytest.approx(0.1)
    assert found.largest == pytest.approx(0.2)
    assert found.deepest_under_estimate == pytest.approx(-0.1)
    assert found.seconds == 2.0


def test_a_tool_that_is_never_too_low_has_no_under_estimate():
    assert summarise([cell(120)]).deepest_under_estimate == 0


def test_silence_is_no_case():
    silent = Cell(answer=Reason(text="no"), measured=100, seconds=0.0)
    assert silent.error is None
    assert summarise([silent]) is None
    assert summarise([silent, cell(110)]).cases == 1


def test_the_table_marks_what_is_missing_and_what_is_outside():
    head, first, second = cases_table(rows())
    assert head == ["case", "measured MiB", "exact", "low", "silent"]
    assert first[:2] == [CASES[0].name, "4.000"]
    assert [text.split(" ")[0] for text in first[2:]] == ["+0.00%", "~-25.00%", "-"]
    assert [text.split(" ")[0] for text in second[2:]] == ["+100.00%", "~+50.00%", "-"]


def test_the_summary_has_a_line_for_what_is_within_the_premises():
    _, *lines = summary_table(rows())
    found = {line[0]: line[1:5] for line in lines}
    assert found == {
        "exact": ["2", "50.00%", "100.00%", "0.00%"],
        "low": ["2", "37.50%", "50.00%", "-25.00%"],
        "low, without ~": ["0", "-", "-", "-"],
        "silent": ["0", "-", "-", "-"],
    }


def test_medians_by_layout():
    head, *lines = layouts_table(rows())
    layouts = [case.name.split()[1] for case in CASES[:2]]
    assert head[1:] == layouts
    assert lines == [
        ["exact", "0.00%", "100.00%"],
        ["low", "25.00%", "50.00%"],
        ["silent", "-", "-"],
    ]


def test_the_legend_says_why():
    assert legend(rows(), (EXACT, LOW, SILENT)) == [
        "exact: nothing",
        "low: nothing; ~ too large",
        "silent: nothing; - cannot speak",
    ]


def test_how_tables_look():
    table = [["tool", "|error|"], ["a", "1"]]
    assert plain(table) == "tool  |error|\na           1"
    assert markdown(table) == "| tool | \\|error\\| |\n| --- | ---: |\n| a | 1 |"


def test_both_files_are_written(tmp_path):
    row = ask(CASES[0], 4 * MIB, [constant(tool.name, LOW_ANSWER) for tool in TOOLS])
    save([row], ["a legend"], tmp_path)
    document = json.loads((tmp_path / "against_others_cpu.json").read_text())
    (found,) = document["rows"]
    assert found["case"] == CASES[0].name
    assert found["tools"]["bigmodel"]["allocated"] == 3 * MIB
    assert found["tools"]["bigmodel"]["error"] == -0.25
    assert document["summary"]["bigmodel"]["all"]["cases"] == 1
    assert document["summary"]["bigmodel"]["within_its_premises"] is None
    page = (tmp_path / "against_others_cpu.md").read_text()
    assert "~-25.00%" in page
    assert "* a legend" in page
