"""The benchmark for one GPU, run to its end without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ("llama bf16 fsdp2", "gpt2 autocast")


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            *("-m", "benchmarks.memory_accuracy.gpu", "--out", str(out)),
            *arguments,
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )


def document(out: Path) -> dict:
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("measured")
    result = run(out, "--only", *CASES)
    assert result.returncode == 0, result.stderr
    for case in CASES:
        assert case in result.stdout
    return document(out)


def test_what_is_predicted_is_measured_within_1_percent(measured):
    assert [row["case"] for row in measured["rows"]] == list(CASES)
    assert measured["failed"] == measured["left_out"] == []
    for row in measured["rows"]:
        predicted, found = row["predicted"], row["measured"]
        assert found["allocated"] > 2**20
        assert abs(predicted["allocated"] / found["allocated"] - 1) <= 0.01, row["case"]
        low, high = (
            predicted["intervals"]["allocated"][end] for end in ("low", "high")
        )
        assert low <= found["allocated"] <= high


def test_what_a_cpu_cannot_say_is_null_and_versions_are_there(measured):
    for row in measured["rows"]:
        for name in ("reserved", "device_total", "seconds"):
            assert row["measured"][name] is None
            assert row["errors"][name] is None
            assert row["predicted"][name] > 0
    for name in ("bigmodel", "torch", "transformers", "python"):
        assert measured["versions"][name]
    assert measured["device"]["kind"] == "cpu"


def test_what_has_no_time_is_listed(tmp_path):
    result = run(tmp_path, "--minutes", "0", "--only", *CASES)
    assert result.returncode == 0, result.stderr
    found = document(tmp_path)
    assert found["rows"] == []
    left_out = [*found["left_out"], *found["failed"]]
    assert [entry["case"] for entry in left_out] == list(CASES)


def test_a_case_that_there_is_not_is_a_mistake(tmp_path):
    result = run(tmp_path, "--only", "gpt9")
    assert result.returncode == 2
    assert "there are 'gpt2 bf16', " in result.stderr
    assert not list(tmp_path.iterdir())
