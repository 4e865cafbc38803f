"""A Llama in pipeline stages, with a plan written by hand instead of found.

    torchrun --nproc-per-node 2 recipes/pipeline_llm.py --schedule 1f1b

Every process holds a stage. The plan is built from the number of processes; cuts can
be uneven, as the first stage has the embedding and the last one the head.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bigmodel import Mesh, Plan, Stages
from bigmodel.api.scripts import script_parser
from bigmodel.plans.document import save
from bigmodel.running.environment import read_process
from bigmodel.running.progress import Progress
from bigmodel.running.script import run_main
from bigmodel.running.session import prepare
from bigmodel.running.text import Windows, standard_library_bytes

BYTES = 256
"""The vocabulary: a token is a byte."""


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=args.sequence,
            use_cache=False,
        )
    )


def make_plan(args: argparse.Namespace, stages: int) -> Plan:
    cuts = args.cuts or [args.layers * stage // stages for stage in range(1, stages)]
    return Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=stages),
        stages=Stages(schedule=args.schedule, cuts=tuple(cuts)),
        units=tuple(f"model.layers.{index}" for index in range(args.layers)),
        micro_batch=args.micro_batch,
        # So many that filling and draining the pipeline costs little.
        accumulation=4 * stages,
    )


def main() -> None:
    parser = script_parser(__doc__, steps=20)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--cuts", type=int, nargs="*", help="first layer of each stage")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=64)
    args = parser.parse_args()
    plan = make_plan(args, read_process().world_size)
    if args.write_plan:
        print(f"wrote {save(plan, args.write_plan)}: {plan.describe()}")
        return
    with prepare(
        plan,
        partial(make_model, args),
        partial(torch.optim.AdamW, lr=args.learning_rate),
        clip_norm=args.clip_norm,
        seed=args.seed,
    ) as engine:
        stage = plan.mesh.stage(engine.rank)
        units = plan.stage_units(stage)
        print(f"stage {stage}: layers {units.start} to {units.stop - 1}", flush=True)
        data = Windows(standard_library_bytes(1_000_000), args.sequence)
        batches = engine.batches(data, seed=args.seed)
        first = last = None
        with Progress(
            engine, args.steps, tokens_per_sample=args.sequence, file=args.metrics
        ) as progress:
            while engine.steps < args.steps:
                last = engine.step(next(batches))
                first = first or last
                progress.show(last)
        if engine.is_first and first and last:
            print(f"loss {float(first.loss):.4f} -> {float(last.loss):.4f}", flush=True)


if __name__ == "__main__":
    run_main(main)
