"""DeepSpeed with optimizer and parameters on a disk (ZeRO-Infinity)."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

import bigmodel
from benchmarks.memory_accuracy.__main__ import CLUSTER
from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.deepspeed.config import deepspeed_config
from bigmodel.plans import DeepSpeedOptions, Offload, Plan
from bigmodel.search import predict
from bigmodel.simulator import Costs
from tests.disk.worker import MEASURED, cross_entropy, data, network, plans

DISK = ("states", "states-groups", "parameters", "both", "both-groups")
ROOT = Path(__file__).parents[2]


@cache
def builds() -> bool:
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    return builders.AsyncIOBuilder().is_compatible(verbose=False)


needs_async_io = pytest.mark.skipif(
    # A string, so that DeepSpeed is imported only if one of these tests is run.
    "not builds()",
    reason="DeepSpeed's async_io cannot be built: libaio's headers are missing",
)


@cache
def found() -> tuple[dict[str, Any], ...]:
    """Train under every plan and return what each rank saw."""
    folder = Path(mkdtemp())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", "tests/disk/worker.py", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        # Compiling the extension takes two of these minutes.
        timeout=480,
        check=False,
    )
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
    return tuple(
        json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)
    )


def of(name: str, rank: int = 0) -> dict[str, Any]:
    seen = found()[rank].get(name, "not reached")
    assert not isinstance(seen, str), seen
    return seen


@cache
def costs(precision: str) -> Costs:
    spec = bigmodel.trace(
        network, data(2), precision=precision, target="cpu", loss=cross_entropy
    )
    return Costs(spec, CLUSTER)


@needs_async_io
@pytest.mark.parametrize("name", DISK)
def test_training_is_the_same_wherever_states_are(name: str) -> None:
    kept, seen = of("kept"), of(name)
    for what in ("losses", "after", "again", "from kept", "fresh", "bf16", "fp16"):
        assert seen[what] == pytest.approx(kept[what], abs=1e-5), what
    assert seen["again"] == seen["after"]


@needs_async_io
@pytest.mark.parametrize("name", DISK)
def test_large_tensors_are_on_the_disk_until_the_engine_is_closed(name: str) -> None:
    states = ("exp_avg-", "exp_avg_sq-", "_gradient_")
    for rank in (0, 1):
        files = of(name, rank)["swapped"]
        for part in states:
            assert any(part in file for file in files) == (name != "parameters")
        weights = sum("_param" in file for file in files)
        # One of the two weights is frozen.
        assert weights == (0 if name.startswith("states") else 2)
        assert of(name, rank)["left"] == 0


@needs_async_io
@pytest.mark.parametrize(("name", "precision"), MEASURED)
def test_memory_is_predicted(name: str, precision: str) -> None:
    plan = replace(dict(plans(Path("/disk")))[name], precision=precision)
    (rank,) = predict(plan, costs(precision)).ranks
    measured = min(of(name, rank)[f"memory {precision}"] for rank in (0, 1))
    assert abs(rank.allocated / measured - 1) < 2e-3


def test_what_is_on_the_disk_is_counted_there() -> None:
    """Two weights of 1024 x 1024: shards of 2 MiB, masters and states of one."""
    estimates = {
        name: predict(plan, costs("fp32")).fullest
        for name, plan in plans(Path("/disk"))
    }
    weight = 1024 * 1024 // 2 * 4
    assert estimates["parameters"].disk == 2 * weight
    assert estimates["states-groups"].disk == 3 * weight
    assert estimates["both-groups"].disk == 5 * weight
    assert estimates["kept"].disk == estimates["cpu"].disk == 0
    assert estimates["both"].allocated < estimates["states"].allocated
    assert estimates["states"].allocated < estimates["kept"].allocated


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"zero_stage": 2}, "offload.optimizer"),
        (
            {"deepspeed": DeepSpeedOptions(max_live_parameters=5)},
            "deepspeed.max_live_parameters",
        ),
        (
            {"deepspeed": DeepSpeedOptions(param_persistence_threshold=10**6)},
            "deepspeed.param_persistence_threshold",
        ),
        (
            {"deepspeed": DeepSpeedOptions(zero_hpz_partition_size=2)},
            "deepspeed.zero_hpz_partition_size",
        ),
    ],
)
def test_refused_with_the_disk(changes: dict[str, Any], field: str) -> None:
    plan = replace(dict(plans(Path("/disk")))["both"], **changes)
    fields = [v.field for v in refusals(BACKENDS.get("deepspeed"), plan)]
    assert field in fields


def test_parameters_on_the_disk_leave_memory_and_are_gathered_one_by_one() -> None:
    zero = deepspeed_config(dict(plans(Path("/disk")))["both"], None)
    zero = zero["zero_optimization"]
    assert zero["offload_param"]["max_in_cpu"] == 0
    assert zero["stage3_prefetch_bucket_size"] == 0
    assert zero["offload_optimizer"]["buffer_count"] == 4


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    offload = Offload(optimizer="disk", folder=str(taken))
    plan = Plan(backend="deepspeed", zero_stage=3, offload=offload)
    if not builds():
        rule = "needs DeepSpeed's extension async_io.*libaio-dev.*offload to cpu"
    else:
        rule = f"rank 0 cannot write to offload.folder '{taken}'"
    with pytest.raises(bigmodel.UsageError, match=rule):
        bigmodel.prepare(plan, network, torch.optim.AdamW, cross_entropy)
