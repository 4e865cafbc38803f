"""The command line: what it prints, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import bigmodel
from bigmodel.cli.main import app
from bigmodel.clusters import document as cluster_document
from bigmodel.plans import document

pytest.importorskip("transformers")

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(scope="module")
def made(config, tmp_path_factory):
    """Plan once, with every output."""
    folder = tmp_path_factory.mktemp("out")
    result = bigmodel_command(
        "plan", config, "--cluster", "2xA100-40GB", "--global-batch", "8",
        "--out", str(folder / "plan.json"), "--html", str(folder / "page.html"),
        "--json",
    )  # fmt: skip
    return folder, result


def bigmodel_command(*arguments: str):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result


def test_planning_writes_json_a_plan_and_a_page(made):
    folder, result = made
    assert result.exit_code == 0, result.output
    decision = json.loads(result.stdout)
    plan = document.load(folder / "plan.json")
    assert document.from_dict(decision["best"]["plan"]) == plan
    assert plan.global_batch == 8
    assert "train with: bigmodel run" in result.stderr
    assert "</html>" in (folder / "page.html").read_text()
    saved = json.loads((folder / "plan.json").read_text())
    assert saved["prediction"]["seconds"] == decision["best"]["seconds"]


def test_estimating_a_plan_file(made, config):
    folder, planned = made
    result = bigmodel_command(
        "estimate", config, "--cluster", "2xA100-40GB",
        "--plan", str(folder / "plan.json"), "--no-measures", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(planned.stdout)["best"]


def test_tables_are_printed_without_json(config):
    result = bigmodel_command(
        "estimate", config, "--cluster", "2xA100-40GB", "--backend", "deepspeed",
        "--zero-stage", "2", "--recompute", "full", "--accumulation", "4",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "deepspeed ZeRO-2 [shard 2] micro-batch 1 x 4 recompute all" in result.stdout
    assert "optimizer states" in result.stdout


def test_estimating_stages(config):
    result = bigmodel_command(
        "estimate", config, "--cluster", "2xA100-40GB", "--backend", "pipeline",
        "--stages", "2", "--schedule", "1f1b", "--accumulation", "4", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    estimate = json.loads(result.stdout)
    assert [stage["stage"] for stage in estimate["stages"]] == [0, 1]
    assert estimate["plan"]["stages"] == {"schedule": "1f1b", "cuts": [1]}


def test_nothing_fits_is_3_and_says_what_would_help(config, tmp_path):
    cluster = bigmodel.cluster("2xA100-40GB")
    path = cluster_document.save(cluster, tmp_path / "small.json")
    data = json.loads(path.read_text())
    data["node"]["device"]["memory"] = 2**20
    path.write_text(json.dumps(data))
    result = bigmodel_command(
        "plan", config, "--cluster", str(path), "--global-batch", "8"
    )
    assert result.exit_code == 3
    assert "too much" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "gpt2"), ("--global-batch",)),
        (
            ("plan", "gpt2", "--global-batch", "0", "--seq-len", "-4"),
            ("--global-batch is 0", "--seq-len is -4"),
        ),
        (
            ("plan", "gpt2", "--global-batch", "8", "--precision", "fp9"),
            ("known: fp32, bf16, fp16, autocast, autocast-fp16",),
        ),
        (
            ("plan", "gpt2", "--global-batch", "8", "--out", "no/such/folder/p.json"),
            ("there is no folder",),
        ),
        (
            ("plan", "gpt9", "--global-batch", "8", "--cluster", "2xA100-40GB"),
            ("did you mean 'gpt2'?", "llama-3.1-405b"),
        ),
        (
            ("plan", "gpt2", "--global-batch", "8", "--cluster", "8xA100"),
            ("did you mean", "A100-40GB", "A100-80GB"),
        ),
        (
            ("plan", "gpt2", "--global-batch", "8", "--cluster", "2xT4"),
            ("T4-16GB does not compute in bfloat16",),
        ),
        (
            ("plan", "gpt2", "--global-batch", "8", "--cluster", "2xA100-40GB",
             "--backend", "mesh-tensorflow"),
            ("no backend named 'mesh-tensorflow'", "fsdp2"),
        ),
        (
            ("plan", "gpt2", "--global-batch", "8", "--cluster", "2xA100-40GB",
             "--seq-len", "4096"),
            ("positions for 1024 tokens",),
        ),
        (("estimate", "gpt2"), ("neither", "give one of them")),
        (
            ("estimate", "gpt2", "--backend", "ddp", "--micro-batch", "0",
             "--accumulation", "-1", "--recompute", "some"),
            ("--micro-batch is 0", "--accumulation is -1",
             "known: none, selective, full"),
        ),
        (
            ("estimate", "gpt2", "--cluster", "2xA100-40GB", "--plan", "none.json"),
            ("there is no plan file 'none.json'",),
        ),
        (
            ("estimate", "gpt2", "--cluster", "2xA100-40GB", "--backend", "xyz"),
            ("no backend named 'xyz'",),
        ),
        (("run", "train.py", "--plan", "none.json"), ("there is no plan file",)),
        (("explode",), ("explode",)),
    ],
)  # fmt: skip
def test_mistakes_are_2_and_said_in_words(arguments, words):
    result = bigmodel_command(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    flat = " ".join(result.stderr.split())
    for word in words:
        assert word in flat


def test_options_that_no_layout_has(config):
    result = bigmodel_command(
        "estimate", config, "--cluster", "2xA100-40GB", "--backend", "pipeline",
        "--stages", "7", "--schedule", "zigzag",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "--stages is 7" in result.stderr
    assert "--schedule is 'zigzag'" in result.stderr


def test_a_script_runs_with_its_arguments(made, monkeypatch, tmp_path):
    folder, _ = made
    seen = {}

    def run_script(script, args, plan, *, log_folder):
        seen.update(script=script, args=args, plan=plan, log_folder=log_folder)
        return 7

    import bigmodel.running.launcher as launcher

    monkeypatch.setattr(launcher, "run_script", run_script)
    result = bigmodel_command(
        "run", "train.py", "--plan", str(folder / "plan.json"),
        "--log-folder", str(tmp_path), "--", "--steps", "3",
    )  # fmt: skip
    assert result.exit_code == 7
    assert seen["args"] == ["--steps", "3"]
    assert seen["plan"] == document.load(folder / "plan.json")
    assert seen["log_folder"] == tmp_path


def test_ctrl_c_is_130(config, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    import bigmodel.api.planning as planning

    monkeypatch.setattr(planning, "plan", interrupted)
    result = bigmodel_command("plan", config, "--global-batch", "8")
    assert result.exit_code == 130


def test_help_teaches_by_example():
    for command in ("plan", "estimate", "run"):
        result = bigmodel_command(command, "--help")
        assert result.exit_code == 0
        assert f"bigmodel {command} " in result.stdout


def test_help_and_usage_errors_load_no_torch():
    code = (
        "import sys\n"
        "from bigmodel.cli.main import app\n"
        "for words in (['--help'], ['plan', 'gpt2', '--global-batch', '0']):\n"
        "    try:\n"
        "        app(words)\n"
        "    except SystemExit as end:\n"
        "        print(end.code)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True
    )
    assert result.returncode == 0, result.stderr
    # Half a second on a free machine.
    assert time.monotonic() - start < 10


def test_the_version():
    result = bigmodel_command("--version")
    assert result.exit_code == 0
    assert result.stdout == f"bigmodel {bigmodel.__version__}\n"
