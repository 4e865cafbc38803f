"""What is measured: models, and plans for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.layouts import all_layouts, not_here
from benchmarks.memory_accuracy.families import (
    FAMILIES,
    Family,
    class_loss,
    features,
)
from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.observe.blocks import find_blocks
from bigmodel.plans import Plan, Precision, RecomputePolicy

PROCESSES = 2
GPT_BLOCKS = 4
MLP_LAYERS = 6
SEQUENCE = 128
VOCABULARY = 512


def gpt() -> nn.Module:
    """A GPT-2 with tied embeddings, 1.9 M parameters."""
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=GPT_BLOCKS,
            n_embd=192,
            n_head=6,
            vocab_size=VOCABULARY,
            n_positions=SEQUENCE,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def mlp() -> nn.Module:
    """A plain MLP, 0.9 M parameters."""
    layers: list[nn.Module] = []
    for _ in range(MLP_LAYERS):
        layers += [nn.Linear(384, 384), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(384, 10))


def gpt_batch(samples: int) -> dict[str, torch.Tensor]:
    """Random tokens."""
    tokens = torch.randint(0, VOCABULARY, (samples, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens.clone()}


MODELS: dict[str, Family] = {
    "gpt": (gpt, gpt_batch, None),
    "mlp": (mlp, features, class_loss),
    **FAMILIES,
}
"""Name to module, batch of a number of samples, loss function."""


_ABOUT = {"gpt": 1_900_000, "mlp": 900_000}
"""Elements by which buckets were sized from the first table on."""


@cache
def units_of(model: str) -> tuple[str, ...]:
    """Return the module paths of a model's blocks."""
    make, _, _ = MODELS[model]
    return find_blocks(make())


@cache
def elements_of(model: str) -> int:
    """Return the number of a model's parameters, or about that: it sizes buckets."""
    if model in _ABOUT:
        return _ABOUT[model]
    make, _, _ = MODELS[model]
    return sum(parameter.numel() for parameter in make().parameters())


PLAIN = (
    "ddp", "ddp-zero1", "fsdp2", "zero1", "zero2", "zero3", "zero3-hpz", "oss",
    "sharded-ddp", "gpipe", "1f1b", "interleaved",
)  # fmt: skip
"""Layouts of which the tests measure a transformer too, not only an MLP."""

SPREAD = ("ddp", "fsdp2", "zero2", "zero3", "sharded-ddp")
"""Layouts under which every family is measured."""

STEPPED = ("adamw-foreach", "adamw-fused", "sgd-momentum", "adafactor")
"""Optimizers that are measured beside AdamW as torch takes it by itself."""

CUT = ("llama", "frozen", "mixtral", "bert")
"""Families that can be cut into stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model under one plan."""

    name: str
    model: str
    plan: Plan


def cases(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the matrix at 2 processes.

    Compiled plans are left out: they are predicted as eager ones, an upper bound.

    Args:
        quick: Take a fifth of it.
        only: Words of which a name must have one, or whole names; none: all.
    """
    for case in _matrix(quick=quick):
        if not only or set(only) & {case.name, *case.name.split()}:
            yield case


def _matrix(*, quick: bool) -> Iterator[Case]:
    if quick:
        for case in _cases("gpt", "full", 2, "fp32"):
            if case.name.split()[1] in PLAIN:
                yield case
        yield from _cases("mlp", "none", 2, "fp32")
        for model in FAMILIES:
            yield from _cases(model, "none", 1, "fp32", ("ddp",))
        return
    for model in ("gpt", "mlp"):
        for recompute in ("none", "full"):
            for accumulation in (1, 4):
                yield from _cases(model, recompute, accumulation, "fp32")
    for precision in ("bf16", "autocast"):
        for accumulation in (1, 2):
            yield from _cases("gpt", "none", accumulation, precision)
    # What takes an nn.Sequential only, in half precision.
    yield from _cases("mlp", "none", 2, "bf16")
    yield from _recomputed()
    yield from _stepped()
    for model in FAMILIES:
        stages = ("1f1b",) if model in CUT else ()
        for recompute in ("none", "full"):
            yield from _cases(model, recompute, 1, "fp32", (*SPREAD, *stages))
        for precision in ("bf16", "autocast"):
            # torch's batch norm takes no 16-bit weights beside fp32 statistics.
            if (model, precision) != ("resnet", "bf16"):
                yield from _cases(model, "none", 2, precision, ("ddp", "fsdp2"))


def _recomputed() -> Iterator[Case]:
    """Yield what recomputes some operators, or some units."""
    for recompute in ("selective", "alternate"):
        yield from _cases("gpt", recompute, 1, "fp32", PLAIN)
        yield from _cases("gpt", recompute, 2, "autocast", PLAIN)
        for model in FAMILIES:
            yield from _cases(model, recompute, 1, "fp32", ("ddp", "fsdp2", "zero3"))


def _stepped() -> Iterator[Case]:
    """Yield other optimizers than AdamW as torch takes it by itself."""
    for optimizer in STEPPED:
        for model in ("gpt", "uneven"):
            yield from _cases(model, "none", 1, "fp32", PLAIN, optimizer)


def _cases(
    model: str,
    recompute: str,
    accumulation: int,
    precision: Precision,
    labels: Sequence[str] = (),
    optimizer: str = "adamw",
) -> Iterator[Case]:
    """Yield the cases of all layouts, or of those with these labels.

    Args:
        model: A name in `MODELS`.
        recompute: A policy of all blocks, or `alternate`: `full` for every second one.
        accumulation: Micro-batches of a step.
        precision: Number format.
        labels: Those of layouts; none: all.
        optimizer: A name in `OPTIMIZERS`.
    """
    layouts = all_layouts(PROCESSES, units_of(model), elements_of(model))
    for label, layout in layouts:
        if labels and label not in labels:
            continue
        plan = replace(
            layout,
            micro_batch=4,
            accumulation=accumulation,
            recompute=_policies(recompute, len(layout.units)),
            precision=precision,
            optimizer=optimizer,
        )
        if plan.compile or not_here(plan):
            continue
        if list(refusals(BACKENDS.get(plan.backend), plan)):
            continue
        yield Case(
            name=f"{model} {label} {recompute} x{accumulation} {precision}"
            + (f" {optimizer}" if optimizer != "adamw" else ""),
            model=model,
            plan=plan,
        )


def _policies(recompute: str, count: int) -> tuple[RecomputePolicy, ...]:
    if recompute == "alternate":
        return tuple("none" if index % 2 else "full" for index in range(count))
    return (cast(RecomputePolicy, recompute),) * count
