"""A checkpoint is read under any plan: another backend, world size, precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from bigmodel.plans import Plan
from tests.checkpoints.worker import (
    BASE,
    GLOBAL_BATCH,
    TEN,
    engine_of,
    layouts,
    step,
)

WORLDS = (4, 3, 2)
"""In this order; each reads what the one before wrote."""


@cache
def folder() -> Path:
    """Run all launches and return where they wrote."""
    found = Path(mkdtemp())
    for before, world in zip((0, *WORLDS), WORLDS, strict=False):
        (found / str(world)).mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={world}", "tests/checkpoints/worker.py"]
        done = subprocess.run(
            [*command, str(found), str(before)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
    return found


@cache
def whole(checkpoint: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, read in one process without a plan."""
    known = FileSystemReader(checkpoint / "state").read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.full(found.size, torch.nan, dtype=torch.float32)
        for name, found in known.items()
        if isinstance(found, TensorStorageMetadata)
    }
    load(state, checkpoint_id=checkpoint / "state", no_dist=True)
    return state


def losses(world: int) -> dict[str, Any]:
    return json.loads((folder() / str(world) / "losses.json").read_text())


CASES = [(world, name) for world in WORLDS for name, _ in layouts(world)]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_ckpt_01_every_layout_goes_on_from_four_replicas(world: int, name: str) -> None:
    loss = losses(world)[name]
    assert not isinstance(loss, str), loss
    before, after = whole(folder() / BASE), whole(folder() / str(world) / name)
    assert before.keys() == after.keys()
    half = name.endswith("bf16")
    for key, value in before.items():
        # Frozen weights have no masters: bfloat16 rounds them, but in FSDP2's shards.
        frozen = key.startswith("model.transformer.h.1.")
        rounded = half and frozen and not name.startswith("fsdp2")
        expected = value.bfloat16().float() if rounded else value
        torch.testing.assert_close(after[key], expected, rtol=0, atol=0, msg=key)
    bound = 3e-2 if half or "hook" in name or "powersgd" in name else 1e-5
    assert abs(loss - losses(4)[BASE]) < bound


def test_ckpt_01_one_process_goes_on_from_four() -> None:
    with engine_of(Plan(backend="ddp", micro_batch=GLOBAL_BATCH)) as engine:
        engine.load(folder() / BASE)
        assert engine.steps == 3
        assert abs(step(engine) - losses(4)[BASE]) < 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_05_padding_moves_no_state_between_numbers_of_ranks(stage: int) -> None:
    """10 weights: partitions of 3 (4 ranks), 4 (3 ranks), 5 (2 ranks)."""
    first, *others = (whole(folder() / str(w) / f"{TEN}-{stage}") for w in WORLDS)
    assert first["optimizer.state.weight.exp_avg"].shape == (2, 5)
    assert float(first["optimizer.state.weight.exp_avg"].abs().min()) > 0
    for other in others:
        assert other.keys() == first.keys()
        for key, value in first.items():
            assert torch.equal(value, other[key]), key
