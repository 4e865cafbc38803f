"""Train a GPT-2 from scratch on bytes: the sources of Python's standard library.

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

from bigmodel.errors import UsageError
from bigmodel.running.environment import read_process
from bigmodel.running.progress import Progress
from bigmodel.running.script import run_main
from bigmodel.running.session import prepare
from bigmodel.running.text import Windows, standard_library_bytes

BYTES = 256
"""The vocabulary: a token is a byte."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", help="plan file; default: BIGMODEL_PLAN")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--out", help="write a checkpoint into this folder at the end")
    parser.add_argument("--resume", help="continue from this checkpoint")
    parser.add_argument("--metrics", help="write one JSON object per step to this file")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--text-bytes", type=int, default=4_000_000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    # The deepspeed launcher appends it; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
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
    plan = args.plan or read_process().plan_path
    if plan is None:
        raise UsageError(
            "no plan is given; use --plan PLAN, or start with: "
            "bigmodel run recipes/pretrain_gpt.py --plan PLAN"
        )
    with prepare(
        plan,
        partial(make_model, args),
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
