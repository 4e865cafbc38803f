"""Plans really trained by accelerate and by Trainer, on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

import bigmodel
from bigmodel.cli.main import app
from bigmodel.errors import WorldError
from bigmodel.plans import DdpOptions, Plan
from bigmodel.plans.document import save
from tests.exports import training
from tests.exports.checks import CHECKS
from tests.exports.training import DDP, FSDP2, ZERO, largest_difference

HERE = Path(__file__).parent
WORLD = 2


def launch(folder: Path, plan: Plan, script: str, *arguments: str) -> str:
    """Run a script with the file that the plan is exported to."""
    path = save(plan, folder / "plan.json")
    file = folder / "plan.yaml"
    result = CliRunner().invoke(
        app, ["export", str(path), "--to", "accelerate", "--out", str(file)]
    )
    assert result.exit_code == 0, result.output
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(file), "--main_process_port", "0"]
    done = subprocess.run(
        [*command, str(HERE / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    """Return what each rank says of every check, all from one launch."""
    folder = tmp_path_factory.mktemp("exports")
    plan = replace(DDP, ddp=DdpOptions())
    said = launch(folder, plan, "worker.py", str(folder))
    files = [folder / f"{rank}.json" for rank in range(WORLD)]
    if not all(file.exists() for file in files):
        pytest.fail(f"the launch ended early:\n{said[-4000:]}", pytrace=False)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CHECKS)
def test_check(results, name: str) -> None:
    for rank, result in enumerate(results):
        text = result.get(name, "the launch ended before this check")
        if text:
            pytest.fail(f"rank {rank}: {text}", pytrace=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plan", "kind"),
    [(FSDP2, "FSDP"), (replace(ZERO, zero_stage=2), "DEEPSPEED")],
    ids=["fsdp2", "zero-2"],
)
def test_the_file_of_accelerate_launch_is_enough(tmp_path, plan, kind) -> None:
    out = tmp_path / "losses.json"
    said = launch(
        tmp_path, plan, "plain_loop.py", kind, str(out), str(plan.accumulation)
    )
    assert out.exists(), said[-4000:]
    losses = json.loads(out.read_text())
    assert largest_difference(losses, training.alone()) < 1e-5


def test_trainer_alone_is_the_plain_loop(tmp_path) -> None:
    plan = Plan(backend="ddp", micro_batch=training.GLOBAL_BATCH, units=training.UNITS)
    keywords = bigmodel.trainer_arguments(plan, clip_norm=0.5, device="cpu")
    with training.fresh_accelerate():
        _, losses = training.by_trainer(keywords, str(tmp_path))
    assert largest_difference(losses, training.alone(0.5, decay=0.0)) < 1e-5


def test_decision_is_an_accelerator_of_its_world() -> None:
    decision = bigmodel.plan(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        (torch.zeros(2, 8), torch.zeros(2, 8)),
        cluster="2xcpu",
        global_batch=4,
        precision="fp32",
        backends=["ddp"],
        loss=lambda output, batch: (output - batch[1]).square().mean(),
    )
    with pytest.raises(WorldError, match="start 2"):
        decision.accelerator()
