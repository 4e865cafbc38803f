"""Fine-tune a causal language model with LoRA: only the adapters train.

    python recipes/finetune_lora.py --write-plan plan.json --model FOLDER --text FILE
    bigmodel run recipes/finetune_lora.py --plan plan.json -- --model FOLDER --text FILE

The model is a local folder with weights, or a config.json for random weights; the text
is read as bytes. With --out the adapter is written as peft writes it.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from peft import (
    LoraConfig,
    PeftModel,
    TaskType,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from bigmodel.api.scripts import script_parser, script_plan
from bigmodel.errors import UsageError
from bigmodel.running.progress import Progress
from bigmodel.running.script import run_main
from bigmodel.running.session import Engine, prepare
from bigmodel.running.text import Windows


def arguments() -> argparse.Namespace:
    parser = script_parser(__doc__, learning_rate=1e-3)
    parser.add_argument("--model", required=True, help="model folder or config.json")
    parser.add_argument("--text", required=True, help="text file to train on")
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sample")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    return parser.parse_args()


def make_model(path: Path, rank: int) -> PeftModel:
    if not path.exists():
        raise UsageError(f"there is no model {str(path)!r}: give a folder or a config")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    config.use_cache = False
    if path.is_file():
        base = AutoModelForCausalLM.from_config(config)
    else:
        base = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, local_files_only=True
        )
    adapter = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=2 * rank,
        target_modules="all-linear",
    )  # fmt: skip
    return get_peft_model(base, adapter)


def write_adapter(engine: Engine, make, folder: Path) -> None:
    """Write what was trained, checked: a gathered tensor is never empty."""
    weights = engine.state_dict()
    if not engine.is_first:
        return
    model = make()
    adapter = get_peft_model_state_dict(model, state_dict=weights)
    empty = [name for name, value in adapter.items() if not value.numel()]
    if empty or not adapter:
        raise UsageError(f"the adapter has nothing to save: {empty or 'no tensors'}")
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config["default"].save_pretrained(folder)
    tensors = {name: value.contiguous() for name, value in adapter.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def main() -> None:
    args = arguments()
    make = partial(make_model, Path(args.model), args.rank)
    text = bytearray(Path(args.text).read_bytes())
    data = Windows(torch.frombuffer(text, dtype=torch.uint8), args.sequence)
    sample = {key: value[None] for key, value in data[0].items()}
    with prepare(
        script_plan(args, make, sample),
        make,
        partial(torch.optim.AdamW, lr=args.learning_rate, weight_decay=0.0),
        clip_norm=args.clip_norm,
        seed=args.seed,
    ) as engine:
        batches = engine.batches(data, seed=args.seed)
        first = last = None
        with Progress(
            engine, args.steps, tokens_per_sample=args.sequence, file=args.metrics
        ) as progress:
            while engine.steps < args.steps:
                last = engine.step(next(batches))
                first = first or last
                progress.show(last)
        if args.out:
            write_adapter(engine, make, Path(args.out))
        if engine.is_first and first and last:
            print(f"loss {float(first.loss):.4f} -> {float(last.loss):.4f}", flush=True)


if __name__ == "__main__":
    run_main(main)
