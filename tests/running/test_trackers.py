"""Numbers of a run in TensorBoard's own files, and in a file of one line a step."""

from __future__ import annotations

import json

import pytest
import torch

from bigmodel.errors import UsageError
from bigmodel.plans import Plan
from bigmodel.running.progress import Progress
from bigmodel.running.session import prepare

PLAN = Plan(backend="ddp", micro_batch=2)


def square(output, batch):
    return output.square().mean()


def test_tensorboard_has_every_step(tmp_path):
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed",
    )
    model, losses = torch.nn.Linear(2, 1), []
    file = tmp_path / "steps.jsonl"
    with (
        prepare(PLAN, model, torch.optim.SGD, square, clip_norm=1.0) as engine,
        Progress(
            engine, 3, file=file, trackers=["tensorboard"], logging_dir=tmp_path
        ) as shown,
    ):
        for _ in range(3):
            result = engine.step(torch.ones(2, 2))
            losses.append(float(result.loss))
            shown.show(result)
    events = reading.EventAccumulator(str(tmp_path / "bigmodel"))
    events.Reload()
    scalars = events.Scalars("loss")
    assert [event.step for event in scalars] == [1, 2, 3]
    assert [event.value for event in scalars] == pytest.approx(losses)
    assert "grad_norm" in events.Tags()["scalars"]
    assert "samples_per_second_per_device" in events.Tags()["scalars"]
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [
        1,
        2,
        3,
    ]


def test_unknown_tracker_and_missing_folder():
    with prepare(PLAN, torch.nn.Linear(2, 1), torch.optim.SGD, square) as engine:
        with pytest.raises(UsageError, match="trackers is 'tensorbord'"):
            Progress(engine, 1, trackers=["tensorbord"])
        with pytest.raises(UsageError, match="'tensorboard' writes files"):
            Progress(engine, 1, trackers=["tensorboard"])
