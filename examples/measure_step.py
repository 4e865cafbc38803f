"""Measure the allocated bytes of the demo's steps; started by demo.py in every process.

On a GPU torch keeps the peak; on the CPU the allocator's own events are recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from bigmodel.running.environment import read_process
from bigmodel.running.measuring import measure_memory
from bigmodel.running.script import run_main
from bigmodel.running.session import Engine, prepare

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))
import pretrain_gpt

LAYERS, HIDDEN, HEADS, SEQUENCE = 4, 128, 4, 128


def sizes() -> list[str]:
    """The model's sizes as arguments of recipes/pretrain_gpt.py."""
    return [
        "--layers", str(LAYERS), "--hidden", str(HIDDEN), "--heads", str(HEADS),
        "--sequence", str(SEQUENCE),
    ]  # fmt: skip


def make_model() -> torch.nn.Module:
    """The model that the recipe trains."""
    return pretrain_gpt.make_model(pretrain_gpt.arguments(sizes()))


def make_engine() -> Engine:
    optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
    return prepare(read_process().plan_path, make_model, optimizer, clip_norm=1.0)


def make_batch(engine: Engine) -> dict[str, torch.Tensor]:
    shape = (engine.plan.local_batch, SEQUENCE)
    tokens = torch.randint(0, pretrain_gpt.BYTES, shape, device=engine.device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    memory = measure_memory(make_engine, make_batch)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"rank{read_process().rank}.json"
    path.write_text(json.dumps(asdict(memory)) + "\n")


if __name__ == "__main__":
    run_main(main)
