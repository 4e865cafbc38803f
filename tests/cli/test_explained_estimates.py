"""`bigmodel estimate`: any rank, units, pictures, intervals and measures."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from bigmodel.cli.main import app

pytest.importorskip("transformers")

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}
STAGES = ("--backend", "pipeline", "--stages", "2", "--schedule", "1f1b",
          "--accumulation", "4")  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def estimate(config: str, *arguments: str):
    words = ["estimate", config, "--cluster", "4xA100-40GB", *arguments]
    result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result


def test_the_text_explains_the_fullest_rank(config):
    result = estimate(config, "--backend", "ddp", "--micro-batch", "4")
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert re.search(r"likely +at least +at most", text)
    for name in ("allocated", "reserved", "device total"):
        assert re.search(rf"{name}( +[0-9.]+ .iB){{3}}", text), name
    assert "▼" in text
    assert re.search(r"│forw\w* *│backward", text)
    # Equal blocks share a row.
    assert re.search(r"\d x [0-9.]+ .iB +model\.layers\.\d to \d", text)
    assert "(before the blocks)" in text
    assert re.search(r"saves +of allocated +step then +fits +by", text)
    assert "recompute full, all units" in text
    assert "micro-batch 2 x 2" in text


def test_measures_can_be_left_out(config):
    result = estimate(config, "--backend", "ddp", "--no-measures")
    assert "of allocated" not in result.stdout
    data = json.loads(
        estimate(config, "--backend", "ddp", "--no-measures", "--json").stdout
    )
    assert data["measures"] == []


def test_json_has_units_intervals_measures_and_the_rank(config):
    result = estimate(config, *STAGES, "--rank", "3", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    asked = data["rank"]
    assert 3 in asked["ranks"]
    assert asked in data["stages"]
    for stage in data["stages"]:
        units = stage["units"]
        assert sum(unit["bytes"] for unit in units) == stage["peak_allocated_bytes"]
        for unit in units:
            assert sum(unit["holders"].values()) == unit["bytes"]
        likely = stage["intervals"]["device_total"]
        assert likely["low"] <= likely["likely"] <= likely["high"]
        assert likely["likely"] == stage["device_total_bytes"]
    fullest = max(stage["device_total_bytes"] for stage in data["stages"])
    assert data["measures"]
    for measure in data["measures"]:
        now = measure["device_total"]["likely"]
        assert measure["saved_device_total_bytes"] == fullest - now


def test_the_text_of_a_rank_is_its_own(config):
    shown = [
        estimate(config, *STAGES, "--no-measures", "--rank", rank).stdout
        for rank in ("0", "3")
    ]
    assert "rank 0 of stage 0 (ranks 0-1), at its peak during" in shown[0]
    assert "rank 3 of stage 1 (ranks 2-3), at its peak during" in shown[1]
    # The first stage has the embedding, the last one the head.
    assert "(before the blocks)" in shown[0]
    assert "(before the blocks)" not in shown[1]


def test_the_page_has_every_section(config, tmp_path):
    path = tmp_path / "memory.html"
    result = estimate(config, *STAGES, "--html", str(path), "--rank", "2")
    assert result.exit_code == 0, result.output
    assert f"wrote {path}" in " ".join(result.stderr.split())
    page = path.read_text()
    for words in (
        "Memory by holder",
        "three numbers",
        "Memory by unit",
        "Memory over the step",
        "What would save memory",
        "Streams of one step",
        "Stage 1 (ranks 2-3)",
    ):
        assert words in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    # The curve of both stages, and the streams.
    assert len(pictures) == 3
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert "<script" not in page
    assert not re.search(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//""", page)


def test_other_precisions_are_measures(config):
    result = estimate(config, "--backend", "ddp", "--precision", "fp32", "--json")
    names = [measure["name"] for measure in json.loads(result.stdout)["measures"]]
    assert {"precision autocast", "precision bf16"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rank", "4"), ("rank is 4", "the plan has 4 ranks, 0 to 3", "name one")),
        (("--rank", "-1"), ("--rank is -1", "numbered from 0")),
        (
            ("--rank", "-2", "--html", "no/such/folder/page.html"),
            ("--rank is -2", "there is no folder"),
        ),
    ],
)
def test_mistakes_are_2_and_said_in_words(config, arguments, words):
    result = estimate(config, "--backend", "ddp", "--no-measures", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    flat = " ".join(result.stderr.split())
    for word in words:
        assert word in flat
