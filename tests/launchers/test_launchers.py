"""One recipe under three launchers: the same script, the same loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bigmodel.plans import DeepSpeedOptions, Mesh, Plan
from bigmodel.plans.document import save
from bigmodel.running.launcher import run_script

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_gpt.py"
ARGS = "--steps 2 --layers 2 --hidden 32 --heads 2 --sequence 32 --text-bytes 20000"

DDP = Plan(backend="ddp", mesh=Mesh(replicate=2), micro_batch=2, accumulation=2)
ZERO = Plan(
    backend="deepspeed",
    zero_stage=2,
    mesh=Mesh(shard=2),
    # The same micro-batches: dropout draws its numbers for each of them.
    micro_batch=2,
    accumulation=2,
    deepspeed=DeepSpeedOptions(bucket_elements=100_000),
)


def run(*command: str) -> float:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return loss_in(done.stdout)


def loss_in(text: str) -> float:
    found = re.findall(r"step 2: loss (\d+\.\d+)", text)
    assert len(found) == 1, text[-4000:]
    return float(found[0])


@pytest.mark.timeout(600)
def test_same_script_under_every_launcher(tmp_path, capfd) -> None:
    ddp = str(save(DDP, tmp_path / "ddp.json"))
    zero = str(save(ZERO, tmp_path / "zero.json"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    metrics = tmp_path / "metrics.jsonl"
    losses = [
        run(*torchrun, "--nproc-per-node=2", str(RECIPE), "--plan", ddp, *ARGS.split()),
        run(deepspeed, "--num_gpus=2", str(RECIPE), "--plan", zero, *ARGS.split()),
    ]
    capfd.readouterr()
    args = [*ARGS.split(), "--metrics", str(metrics)]
    assert run_script(RECIPE, args, DDP, log_folder=tmp_path / "logs") == 0
    losses.append(loss_in(capfd.readouterr().out))
    # Equal global batches in an order that does not depend on the plan.
    assert max(losses) - min(losses) < 2e-4
    assert len(metrics.read_text().splitlines()) == 2


def test_failing_process_ends_the_others(tmp_path, capfd) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys, time\n"
        "print('hello from', os.environ['RANK'], flush=True)\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('no memory left', file=sys.stderr)\n"
        "    sys.exit(4)\n"
        "time.sleep(300)\n"
    )
    assert run_script(script, [], DDP, log_folder=tmp_path / "logs") == 4
    shown = capfd.readouterr()
    assert "hello from 1" not in shown.out
    assert "rank 1 failed with exit code 4" in shown.err
    assert "no memory left" in shown.err
