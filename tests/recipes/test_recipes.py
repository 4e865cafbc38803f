"""Every recipe, planned, run on two processes, and what it shows checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config

from bigmodel.plans import Mesh, Plan
from bigmodel.plans.document import save

RECIPES = Path(__file__).parents[2] / "recipes"
BIGMODEL = str(Path(sys.executable).with_name("bigmodel"))
LONGEST = 120
EVERY = sorted(RECIPES.glob("*.py"))


def run(*command: object, code: int = 0) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stdout[-4000:]
    return done.stdout


DDP = Plan(backend="ddp", mesh=Mesh(replicate=2), micro_batch=4)
FSDP = Plan(backend="fsdp2", mesh=Mesh(shard=2), micro_batch=4)


def run_recipe(name: str, folder: Path, chosen: Plan | None, *args: object) -> str:
    """Run a recipe by a plan; None: one that the recipe finds itself."""
    plan, script = folder / "plan.json", RECIPES / f"{name}.py"
    if chosen is None:
        asked = ["--cluster", "2xcpu", "--backend", "fsdp2", "--global-batch", 64]
        run(sys.executable, script, "--write-plan", plan, *asked, *args)
    else:
        save(chosen, plan)
    logs = ["--log-folder", folder / "logs"]
    return run(BIGMODEL, "run", script, "--plan", plan, *logs, "--", *args)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[object]:
    """Return arguments that name a tiny model and a text."""
    folder = tmp_path_factory.mktemp("tiny")
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0, architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    config.save_pretrained(folder)
    text = folder / "text.txt"
    text.write_text("all work and no play makes jack a dull boy. " * 200)
    return ["--model", folder / "config.json", "--text", text, "--sequence", 32]


def before_and_after(output: str) -> tuple[float, float]:
    found = re.findall(r"(\d+\.\d+) -> (\d+\.\d+)", output)
    assert len(found) == 1, output[-2000:]
    return float(found[0][0]), float(found[0][1])


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_a_recipe_can_be_read_in_one_go(path):
    assert len(path.read_text().splitlines()) <= LONGEST


def test_finetune_lora_trains_adapters_and_writes_what_it_trained(tmp_path, tiny):
    from safetensors.torch import load_file

    out = tmp_path / "adapter"
    args = [*tiny, "--steps", 12, "--learning-rate", "1e-2", "--out", out]
    first, last = before_and_after(run_recipe("finetune_lora", tmp_path, FSDP, *args))
    assert last < first - 0.1
    adapter = load_file(out / "adapter_model.safetensors")
    # B starts at zero: what is written is what was trained.
    moved = [value for name, value in adapter.items() if "lora_B" in name]
    assert moved
    assert all(value.abs().max() > 0 for value in moved)
    assert (out / "adapter_config.json").is_file()


def test_finetune_hf_writes_a_model_that_transformers_reads(tmp_path, tiny):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "model"
    args = [*tiny, "--steps", 3, "--out", out]
    output = run_recipe("finetune_hf", tmp_path, DDP, *args)
    assert re.search(r"step 3: loss \d", output)
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0


def test_finetune_encoder_brings_pairs_together(tmp_path):
    args = ["--pairs", 48, "--steps", 4]
    first, last = before_and_after(run_recipe("finetune_encoder", tmp_path, DDP, *args))
    assert last < first


def test_train_vision_recognises_digits_it_has_not_seen(tmp_path):
    args = ["--steps", 120, "--hidden", 48]
    output = run_recipe("train_vision", tmp_path, None, *args)
    (accuracy,) = re.findall(r"held-out accuracy (\d\.\d+)", output)
    assert float(accuracy) > 0.6, "guessing gives 0.1"


def test_pipeline_llm_runs_the_plan_that_it_makes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    recipe = RECIPES / "pipeline_llm.py"
    output = run(
        *torchrun, "--nproc-per-node=2", recipe, "--steps", 12, "--cuts", 1,
        "--learning-rate", "5e-3",
    )  # fmt: skip
    assert "stage 0: layers 0 to 0" in output
    assert "stage 1: layers 1 to 3" in output
    first, last = before_and_after(output)
    assert last < first - 0.5


def test_outgrow_one_gpu_goes_from_nothing_fits_to_a_run_within_the_memory(tmp_path):
    recipe = RECIPES / "outgrow_one_gpu.py"
    memory = ["--device-memory", "520MiB", "--hidden", 512, "--global-batch", 4]
    output = run(sys.executable, recipe, *memory, "--out", tmp_path)
    assert "one device: nothing fits" in output
    assert re.search(r"rank 0: measured peak .*, within", output), output
