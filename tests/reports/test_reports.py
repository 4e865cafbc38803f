"""Tables, documents and the page, from a decision made by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from rich.console import Console

from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.plans.document import from_dict
from bigmodel.reports.memory_bars import draw_memory_bars
from bigmodel.reports.memory_curve import draw_memory_curve
from bigmodel.reports.page import Comparison, render_page, save_page
from bigmodel.reports.streams_chart import draw_streams
from bigmodel.reports.tables import decision_report, estimate_report
from bigmodel.search.decision import Decision
from bigmodel.search.prediction import (
    Estimate,
    Interval,
    Measure,
    RankMemory,
    Term,
    UnitMemory,
)
from bigmodel.search.rejections import Rejected, group_rejected
from bigmodel.simulator import Peak, Timeline
from bigmodel.simulator.timeline import Span

GIB = 2**30
UNITS = tuple(f"model.layers.{index}" for index in range(32))


def timeline(count: int = 4000) -> Timeline:
    spans = tuple(
        Span(
            label=f"{'backward' if n % 40 > 19 else 'forward'} layers.{n % 20} <b>",
            stream="communication" if n % 5 == 0 else "compute",
            start=n / count,
            end=(n + 0.9) / count,
            live=GIB * (10 + (n * 37) % 50),
        )
        for n in range(count)
    )
    top = max(spans, key=lambda span: span.live)
    return Timeline(
        spans=spans,
        peak=Peak(
            num_bytes=top.live,
            holders=(("weights", top.live),),
            moment=top.label,
            seconds=top.start,
        ),
        seconds=1.0,
        busy={"compute": 0.7, "communication": 0.2},
        waiting=0.3,
        base=(("weights", 10 * GIB),),
    )


def estimate(plan: Plan, total: int = 60, seconds: float = 1.5) -> Estimate:
    terms = (
        Term(name="activations", num_bytes=(total - 20) * GIB, because="traced"),
        Term(name="weights", num_bytes=20 * GIB, because="8.03e9 x 2 B"),
    )
    ranks = tuple(
        RankMemory(
            stage=stage,
            ranks=plan.mesh.stage_ranks(stage),
            allocated=(total - 3) * GIB - stage,
            reserved=(total - 1) * GIB - stage,
            device_total=total * GIB - stage,
            moment="backward of layers.31",
            terms=terms,
            intervals=(
                Interval(
                    low=(total - 5) * GIB,
                    likely=(total - 3) * GIB - stage,
                    high=(total - 2) * GIB,
                ),
                Interval(
                    low=(total - 5) * GIB,
                    likely=(total - 1) * GIB - stage,
                    high=(total + 2) * GIB,
                ),
                Interval(
                    low=(total - 2) * GIB,
                    likely=total * GIB - stage,
                    high=(total + 4) * GIB,
                ),
            ),
            units=(
                *(
                    UnitMemory(unit=name, holders=(("weights", GIB // 2),))
                    for name in plan.units[:30]
                ),
                UnitMemory(
                    unit=plan.units[30],
                    holders=(("activations", GIB), ("weights", GIB // 2)),
                ),
            ),
        )
        for stage in range(plan.mesh.pipeline)
    )
    return Estimate(
        plan=plan,
        ranks=ranks,
        capacity=80 * GIB,
        low=(total - 2) * GIB,
        high=(total + 4) * GIB,
        seconds=seconds,
        compute_seconds=0.75 * seconds,
        exposed_seconds=0.25 * seconds,
        tokens_per_second_per_gpu=12_345.6,
        mfu=0.417,
        timelines=tuple(timeline() for _ in ranks),
        measures=(
            Measure(
                name="recompute <full>, all units",
                plan=replace(plan, recompute=("full",) * len(plan.units)),
                saved_allocated=11 * GIB,
                saved_device_total=9 * GIB,
                device_total=Interval(
                    low=(total - 11) * GIB,
                    likely=(total - 9) * GIB,
                    high=(total - 5) * GIB,
                ),
                seconds=2 * seconds,
                fits=True,
            ),
            Measure(
                name="optimizer sgd-momentum",
                plan=replace(plan, optimizer="sgd-momentum"),
                saved_allocated=GIB,
                saved_device_total=0,
                device_total=Interval(
                    low=total * GIB, likely=total * GIB, high=(total + 4) * GIB
                ),
                seconds=seconds,
                fits=True,
            ),
        ),
    )


FSDP = Plan(
    backend="fsdp2", mesh=Mesh(shard=8), accumulation=8, precision="bf16", units=UNITS
)
STAGED = Plan(
    backend="pipeline",
    mesh=Mesh(pipeline=4, shard=2),
    accumulation=8,
    precision="bf16",
    units=UNITS,
    stages=Stages(schedule="1f1b", cuts=(8, 16, 24)),
)


@pytest.fixture(scope="module", params=[FSDP, STAGED], ids=["fsdp2", "pipeline"])
def decision(request) -> Decision:
    other = STAGED if request.param is FSDP else FSDP
    too_large = estimate(replace(FSDP, micro_batch=2), total=90)
    return Decision(
        model="llama-3.1-8b",
        cluster="8 x H100-80GB",
        global_batch=64,
        best=estimate(request.param),
        runners_up=(estimate(other, total=70, seconds=2.0),),
        rejected=(
            Rejected(plan=FSDP, reason="does not fit: 14.00 GiB too much on stage 0"),
            Rejected(
                plan=too_large.plan,
                reason="does not fit: 3.00 GiB too much on stage 1",
                estimate=too_large,
            ),
            Rejected(plan=STAGED, reason="backend 'ddp' has no <stages>"),
        ),
        considered=5,
        simulated=3,
    )


def text_of(renderable) -> str:
    console = Console(width=160, record=True, file=None, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_rejected_plans_are_grouped_but_for_numbers(decision):
    groups = group_rejected(decision.rejected)
    assert [group.count for group in groups] == [2, 1]
    # The one that comes closest.
    assert groups[0].reason == "does not fit: 3.00 GiB too much on stage 1"


def test_tables_say_everything(decision):
    text = text_of(decision_report(decision))
    for words in (
        decision.best.plan.describe(),
        decision.runners_up[0].plan.describe(),
        "1.50 s",
        "12,346",
        "41.7%",
        "57.00 GiB allocated",
        "59.00 GiB reserved",
        "60.00 GiB of 80.00 GiB",
        "backward of layers.31",
        "8.03e9 x 2 B",
        "3.00 GiB too much",
    ):
        assert words in text
    # Likely, at least, at most.
    ends = r"device total +60\.00 GiB +58\.00 GiB +64\.00 GiB"
    assert re.search(ends, text)
    # Every stage of a pipeline has a line.
    stages = decision.best.plan.mesh.pipeline
    assert bool(re.search(r"stage +ranks +allocated +reserved", text)) == (stages > 1)


def test_a_plan_that_does_not_fit_says_by_how_much():
    text = text_of(estimate_report(estimate(FSDP, total=90)))
    assert "does not fit: the device total can be 94.00 GiB" in text
    assert "14.00 GiB more than 80.00 GiB" in text


def test_documents_are_json_with_plain_types(decision):
    document = json.loads(json.dumps(decision.to_dict()))
    best = document["best"]
    assert from_dict(best["plan"]) == decision.plan
    for key, value in best.items():
        if key.endswith("_bytes"):
            assert isinstance(value, int), key
        if key.endswith("seconds"):
            assert isinstance(value, float), key
    stage = best["stages"][0]
    assert sum(term["bytes"] for term in stage["terms"]) == stage["device_total_bytes"]
    assert [group["count"] for group in document["rejected"]] == [2, 1]
    assert decision.best.to_dict() == decision.to_dict()["best"]


def test_bars_share_one_scale(decision):
    bars = draw_memory_bars((decision.best, *decision.runners_up))
    for bar in bars.bars:
        total = bar.estimate.fullest.device_total
        width = sum(piece.width for piece in bar.pieces)
        expected = bars.capacity * total / bar.estimate.capacity
        assert width == pytest.approx(expected, rel=1e-6)
        assert 0 <= bar.low <= bar.high <= 100
    assert [name for name, _ in bars.legend] == ["activations", "weights"]


def test_thinning_the_curve_keeps_the_peak():
    line = timeline()
    curve = draw_memory_curve(line)
    heights = [float(point.split(",")[1]) for point in curve.points.split()]
    assert min(heights) == pytest.approx(curve.peak_y)
    assert len(heights) < 600


def test_lanes_are_thinned_and_stay_in_the_picture():
    lanes = draw_streams([timeline(), timeline()])
    assert [lane.name for lane in lanes] == [
        "stage 0 communication",
        "stage 0 compute",
        "stage 1 communication",
        "stage 1 compute",
    ]
    boxes = [box for lane in lanes for box in lane.boxes]
    assert len(boxes) <= 1000
    assert all(box.left >= 0 and box.left + box.width <= 1001 for box in boxes)
    assert draw_streams([]) == ()


def test_the_page_needs_nothing_else(decision, tmp_path):
    page = save_page(decision, tmp_path / "page.html").read_text()
    assert len(page.encode()) < 300_000
    assert not re.search(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//""", page)
    assert "<script" not in page
    assert "<link" not in page
    # What comes from names is escaped.
    assert "&lt;b&gt;" in page
    assert "&lt;stages&gt;" in page
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    # Bars, streams, and the curve of every stage.
    pictures = 2 + decision.plan.mesh.pipeline
    assert page.count('role="img"') == pictures
    assert page.count("<title id=") == pictures


def test_the_pictures_are_well_formed(decision):
    for picture in re.findall(r"<svg.*?</svg>", render_page(decision), re.DOTALL):
        ElementTree.fromstring(picture)


def test_a_page_without_timelines(decision):
    bare = replace(decision, best=replace(decision.best, timelines=()), rejected=())
    page = render_page(bare)
    assert "Streams of one step" not in page
    assert "Rejected plans" not in page


def test_measured_values_are_compared(decision):
    rows = (
        Comparison(name="peak allocated", predicted=1.1 * GIB, measured=GIB),
        Comparison(name="step", predicted=0.9, measured=1.0, is_bytes=False),
    )
    page = render_page(decision, rows)
    assert "Predicted against measured" in page
    assert "+10.0%" in page
    assert "-10.0%" in page


def test_reports_import_no_torch():
    code = (
        "import sys, bigmodel.reports.page, bigmodel.reports.tables, "
        "bigmodel.search.decision; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
