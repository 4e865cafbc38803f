"""The same script, from a model that does not fit one device to a plan that does.

    python recipes/outgrow_one_gpu.py --device-memory 40MiB --devices 2 --hidden 256

1. A plan for one device is estimated, and refused: it says what holds how much.
2. The fastest plan that fits on more devices is found.
3. It is run, and every rank's measured peak is compared with the memory it was given.

Devices are this machine's cores; on GPUs give their name, as in --device A100-40GB.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import bigmodel
from bigmodel.api.scripts import script_parser
from bigmodel.running.environment import read_process
from bigmodel.running.launcher import run_script
from bigmodel.running.measuring import measure_memory
from bigmodel.running.script import run_main
from bigmodel.running.session import prepare
from bigmodel.units import format_bytes, parse_bytes

VOCABULARY, SEQUENCE = 256, 64


def make_model(args: argparse.Namespace) -> GPT2LMHeadModel:
    sizes = {"n_embd": args.hidden, "n_layer": args.layers, "n_head": 4}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=SEQUENCE, use_cache=False,
            bos_token_id=0, eos_token_id=0, **sizes, **dropouts,
        )
    )  # fmt: skip


def make_batch(samples: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (samples, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens}


def devices(args: argparse.Namespace, count: int) -> bigmodel.Cluster:
    """Return a cluster whose devices have the memory that the user gave them."""
    found = bigmodel.cluster(f"{count}x{args.device}")
    if args.device_memory is None:
        return found
    device = replace(found.node.device, memory=parse_bytes(args.device_memory))
    return replace(found, node=replace(found.node, device=device))


def plan_and_run(args: argparse.Namespace) -> int:
    make = partial(make_model, args)
    decide = partial(
        bigmodel.plan, make, make_batch(1), global_batch=args.global_batch,
        precision=args.precision, backends=args.backend,
    )  # fmt: skip
    try:
        print(decide(cluster=devices(args, 1)))
        print("it fits one device: give a larger --hidden or a smaller --device-memory")
        return 0
    except bigmodel.NothingFitsError as error:
        print(f"one device: {error}\n")
    decision = decide(cluster=devices(args, args.devices))
    print(decision)
    capacity = decision.best.capacity
    return run_script(
        Path(__file__),
        [*sys.argv[1:], "--capacity", str(capacity)],
        decision.plan,
        log_folder=Path(args.out or "outgrow-out"),
    )


def train(args: argparse.Namespace, plan: str) -> None:
    """Run some steps on this rank and compare its peak with the device's memory."""
    optimizer = partial(torch.optim.AdamW, lr=args.learning_rate)
    memory = measure_memory(
        lambda: prepare(plan, partial(make_model, args), optimizer),
        lambda engine: make_batch(engine.plan.local_batch),
    )
    verdict = "within" if memory.peak <= args.capacity else "beyond"
    print(
        f"rank {read_process().rank}: measured peak {format_bytes(memory.peak)}, "
        f"{verdict} the device's {format_bytes(args.capacity)}",
        flush=True,
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="as in the table of devices")
    parser.add_argument("--device-memory", help="such as 40MiB; default: its own")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--capacity", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    started_with = read_process().plan_path
    if started_with is not None:
        train(args, started_with)
        return
    sys.exit(plan_and_run(args))


if __name__ == "__main__":
    run_main(main)
