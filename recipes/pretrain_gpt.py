"""Train a GPT-2 from scratch on bytes: the sources of Python's standard library.

    python recipes/pretrain_gpt.py --write-plan plan.json --cluster 2xcpu
    bigmodel run recipes/pretrain_gpt.py --plan plan.json -- --layers 4 --steps 100
    torchrun --nproc-per-node 2 recipes/pretrain_gpt.py --plan plan.json
    deepspeed --num_gpus 2 recipes/pretrain_gpt.py --plan plan.json

Nothing is downloaded. The plan says how: backend, batch, recomputation, precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from bigmodel.api.scripts import script_parser, script_plan
from bigmodel.running.progress import Progress
from bigmodel.running.script import run_main
from bigmodel.running.session import prepare
from bigmodel.running.text import Windows, standard_library_bytes

BYTES = 256
"""The vocabulary: a token is a byte."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--resume", help="continue from this checkpoint")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--text-bytes", type=int, default=4_000_000)
    return parser.parse_args(argv)


def make_model(args: argparse.Namespace) -> GPT2LMHeadModel:
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=BYTES,
            n_positions=args.sequence,
            n_embd=args.hidden,
            n_layer=args.layers,
            n_head=args.heads,
            resid_pdrop=args.dropout,
            embd_pdrop=args.dropout,
            attn_pdrop=args.dropout,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
    # What it falls back to, with a warning.
    model.loss_type = "ForCausalLM"
    return model


def main() -> None:
    args = arguments()
    make = partial(make_model, args)
    tokens = torch.zeros(1, args.sequence, dtype=torch.int64)
    plan = script_plan(args, make, {"input_ids": tokens, "labels": tokens})
    with prepare(
        plan,
        make,
        partial(torch.optim.AdamW, lr=args.learning_rate, weight_decay=0.1),
        clip_norm=args.clip_norm,
        seed=args.seed,
    ) as engine:
        if args.resume:
            engine.load(args.resume)
        data = Windows(standard_library_bytes(args.text_bytes), args.sequence)
        batches = engine.batches(data, seed=args.seed, start=engine.steps)
        result = None
        with Progress(
            engine, args.steps, tokens_per_sample=args.sequence, file=args.metrics
        ) as progress:
            while engine.steps < args.steps:
                result = engine.step(next(batches))
                progress.show(result)
        if args.out:
            engine.save(args.out)
        if engine.is_first and result is not None:
            print(f"step {engine.steps}: loss {float(result.loss):.4f}", flush=True)


if __name__ == "__main__":
    run_main(main)
