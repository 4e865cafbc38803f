"""Fine-tune a causal language model of transformers on a text file.

    python recipes/finetune_hf.py --write-plan plan.json --model FOLDER --text FILE
    bigmodel run recipes/finetune_hf.py --plan plan.json -- --model FOLDER --text FILE
    torchrun --nproc-per-node 2 recipes/finetune_hf.py --model FOLDER --text FILE

The model is a local folder with weights, or a config.json for random weights. Without
a tokenizer in the folder the text is read as bytes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from bigmodel.api.scripts import script_parser, script_plan
from bigmodel.errors import UsageError
from bigmodel.running.progress import Progress
from bigmodel.running.script import run_main
from bigmodel.running.session import Engine, prepare
from bigmodel.running.text import Windows


def arguments() -> argparse.Namespace:
    parser = script_parser(__doc__, learning_rate=1e-5)
    parser.add_argument("--model", required=True, help="model folder or config.json")
    parser.add_argument("--text", required=True, help="text file to train on")
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sample")
    return parser.parse_args()


def read_config(path: Path):
    if not path.exists():
        raise UsageError(f"there is no model {str(path)!r}: give a folder or a config")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    config.use_cache = False
    return config


def make_model(path: Path) -> PreTrainedModel:
    config = read_config(path)
    if path.is_file():
        return AutoModelForCausalLM.from_config(config)
    return AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, local_files_only=True
    )


def read_tokens(text: Path, model: Path) -> Tensor:
    if not text.is_file() or not text.stat().st_size:
        raise UsageError(f"there is no text in a file {str(text)!r}")
    if model.is_dir() and any(model.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        return tokenizer(text.read_text(), return_tensors="pt")["input_ids"][0]
    vocabulary = read_config(model).get_text_config().vocab_size
    if vocabulary < 256:
        raise UsageError(
            f"{str(model)!r} has no tokenizer, and its vocabulary of {vocabulary} is "
            "too small for bytes; put the tokenizer's files into the folder"
        )
    return torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8)


def write_model(engine: Engine, model: Path, folder: Path) -> None:
    weights = engine.state_dict()
    if engine.is_first:
        trained = AutoModelForCausalLM.from_config(read_config(model))
        trained.load_state_dict(weights)
        trained.save_pretrained(folder)


def main() -> None:
    args = arguments()
    model = Path(args.model)
    tokens = read_tokens(Path(args.text), model)
    windows = Windows(tokens, args.sequence)
    sample = {key: value[None] for key, value in windows[0].items()}
    make = partial(make_model, model)
    with prepare(
        script_plan(args, make, sample),
        make,
        partial(torch.optim.AdamW, lr=args.learning_rate),
        clip_norm=args.clip_norm,
        seed=args.seed,
    ) as engine:
        batches = engine.batches(windows, seed=args.seed)
        result = None
        with Progress(
            engine, args.steps, tokens_per_sample=args.sequence, file=args.metrics
        ) as progress:
            while engine.steps < args.steps:
                result = engine.step(next(batches))
                progress.show(result)
        if args.out:
            write_model(engine, model, Path(args.out))
        if engine.is_first and result is not None:
            print(f"step {engine.steps}: loss {float(result.loss):.4f}", flush=True)


if __name__ == "__main__":
    run_main(main)
