"""A tiny model trained in one process, by accelerate, by the engine and by Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import bigmodel
from bigmodel.plans import DdpOptions, DeepSpeedOptions, Mesh, Plan

STEPS = 4
GLOBAL_BATCH = 8
RATE = 5e-3
DECAY = 0.1
UNITS = ("model.layers.0", "model.layers.1")
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    use_cache=False,
)

DDP = Plan(
    backend="ddp",
    mesh=Mesh(replicate=2),
    micro_batch=2,
    accumulation=2,
    units=UNITS,
    ddp=DdpOptions(bucket_megabytes=1.0),
)
FSDP2 = Plan(
    backend="fsdp2", mesh=Mesh(shard=2), micro_batch=2, accumulation=2, units=UNITS
)
ZERO = Plan(
    backend="deepspeed",
    zero_stage=1,
    mesh=Mesh(shard=2),
    micro_batch=2,
    accumulation=2,
    units=UNITS,
    deepspeed=DeepSpeedOptions(bucket_elements=100_000),
)


def recomputed(plan: Plan) -> Plan:
    return replace(plan, recompute=("full",) * len(plan.units))


def make_model(config: LlamaConfig = CONFIG) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def all_tokens() -> torch.Tensor:
    return torch.randint(
        0, 64, (STEPS * GLOBAL_BATCH, 16), generator=torch.Generator().manual_seed(1)
    )


def optimizer_of(params, decay: float = DECAY) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, weight_decay=decay)


def alone(clip_norm: float | None = None, decay: float = DECAY) -> list[float]:
    """Return the losses of the global batches, in one process without any library."""
    model = make_model()
    optimizer = optimizer_of(model.parameters(), decay)
    losses = []
    for batch in all_tokens().split(GLOBAL_BATCH):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_engine(plan: Plan, clip_norm: float | None = None) -> list[float]:
    """Return the losses under `bigmodel.prepare`."""
    engine = bigmodel.prepare(plan, make_model, optimizer_of, clip_norm=clip_norm)
    losses = []
    for batch in all_tokens().split(GLOBAL_BATCH):
        local = batch.chunk(plan.world)[engine.rank]
        losses.append(float(engine.step({"input_ids": local, "labels": local}).loss))
    engine.close()
    return losses


def by_accelerate(
    accelerator,
    model,
    clip_norm: float | None = None,
    *,
    world: int = 2,
    micro_batch: int = 2,
) -> list[float]:
    """Return the losses of the loop that accelerate's documentation shows."""
    model, optimizer = accelerator.prepare(model, optimizer_of(model.parameters()))
    losses = []
    for batch in all_tokens().split(GLOBAL_BATCH):
        local = batch.chunk(world)[accelerator.process_index]
        total = torch.zeros(())
        for micro in local.split(micro_batch):
            with accelerator.accumulate(model):
                loss = model(input_ids=micro, labels=micro).loss
                total += loss.detach() * len(micro) / GLOBAL_BATCH
                accelerator.backward(loss)
                if clip_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip_norm)
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def by_trainer(keywords: dict[str, Any], folder: str) -> tuple[str, list[float]]:
    """Return accelerate's kind of job and the losses, without weight decay."""
    arguments = TrainingArguments(
        output_dir=folder,
        learning_rate=RATE,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **keywords,
    )
    if keywords.get("fsdp"):
        shard_over_cpus()
    data = [{"input_ids": row, "labels": row} for row in all_tokens()]
    trainer = Trainer(model=make_model(), args=arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer.accelerator.distributed_type.value, losses


def shard_over_cpus() -> None:
    """Let accelerate take CPU processes for GPUs, as it leaves FSDP out on CPUs."""
    from accelerate.state import DistributedType, PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Forget what accelerate keeps for the whole process, before and after."""
    forget_accelerate()
    try:
        yield
    finally:
        forget_accelerate()


def forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            del os.environ[name]


def largest_difference(got: list[float], expected: list[float]) -> float:
    assert len(got) == len(expected)
    return max(abs(a - b) for a, b in zip(got, expected, strict=True))
