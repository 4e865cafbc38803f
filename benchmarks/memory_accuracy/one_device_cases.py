"""What is measured on one device: a GPT-2 and a Llama, of a real size or tiny.

Every case is a plan for one process: without sharding, or under FSDP2 at world size 1,
which gathers, copies out and reduces as with many ranks but sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bigmodel.plans import Fsdp2Options, Offload, Plan, Precision, RecomputePolicy

Scale = Literal["real", "tiny"]
Name = Literal["gpt2", "llama"]

_CPU = Offload(parameters="cpu", optimizer="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's batches."""

    vocabulary: int
    length: int
    """Tokens of a sample."""
    micro_batch: int


SHAPES: Mapping[tuple[Name, Scale], Shape] = {
    ("gpt2", "real"): Shape(vocabulary=50257, length=1024, micro_batch=8),
    ("gpt2", "tiny"): Shape(vocabulary=512, length=128, micro_batch=4),
    ("llama", "real"): Shape(vocabulary=32000, length=2048, micro_batch=4),
    ("llama", "tiny"): Shape(vocabulary=512, length=128, micro_batch=4),
}


def make_model(name: Name, scale: Scale) -> nn.Module:
    """Return a model with random weights: 355 M and 1.1 B parameters, or 3 M."""
    real, shape = scale == "real", SHAPES[name, scale]
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=24 if real else 4,
                n_embd=1024 if real else 256,
                n_head=16 if real else 4,
                vocab_size=shape.vocabulary,
                n_positions=shape.length,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=22 if real else 4,
            hidden_size=2048 if real else 256,
            intermediate_size=5632 if real else 512,
            num_attention_heads=32 if real else 8,
            num_key_value_heads=4,
            vocab_size=shape.vocabulary,
            max_position_embeddings=shape.length,
            use_cache=False,
        )
    )


def make_batch(name: Name, scale: Scale, samples: int) -> dict[str, torch.Tensor]:
    """Return random tokens with themselves as labels."""
    shape = SHAPES[name, scale]
    ids = torch.randint(1, shape.vocabulary, (samples, shape.length))
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan of one model."""

    model: Name
    precision: Precision
    words: str = ""
    """What else is particular about it."""
    backend: str = "ddp"
    optimizer: str = "adamw"
    recompute: RecomputePolicy = "none"
    accumulation: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the plan."""

    @property
    def name(self) -> str:
        """The case in words."""
        return " ".join(filter(None, (self.model, self.precision, self.words)))

    def plan(self, scale: Scale, units: tuple[str, ...]) -> Plan:
        """Return the plan for the units that were traced."""
        recomputed = () if self.recompute == "none" else (self.recompute,) * len(units)
        return Plan(
            backend=self.backend,
            micro_batch=SHAPES[self.model, scale].micro_batch,
            accumulation=self.accumulation,
            precision=self.precision,
            optimizer=self.optimizer,
            units=units,
            recompute=recomputed,
            **self.options,
        )


def cases() -> Iterator[Case]:
    """Yield the cases, those that tell most first: time may end before they do."""
    keep = {"fsdp2": Fsdp2Options(reshard_after_forward=False)}
    fsdp2 = {"words": "fsdp2", "backend": "fsdp2"}
    full = {"recompute": "full"}
    yield Case(model="gpt2", precision="bf16")
    yield Case(model="llama", precision="bf16", words="recompute full", **full)
    yield Case(model="llama", precision="bf16", **fsdp2)
    yield Case(model="gpt2", precision="autocast")
    yield Case(model="gpt2", precision="fp32")
    yield Case(model="llama", precision="bf16")
    yield Case(model="gpt2", precision="bf16", **fsdp2)
    yield Case(
        model="llama",
        precision="bf16",
        words="fsdp2 on cpu, recompute full",
        backend="fsdp2",
        options={"offload": _CPU},
        **full,
    )
    yield Case(model="gpt2", precision="bf16", words="fused", optimizer="adamw-fused")
    yield Case(model="gpt2", precision="bf16", words="sgd", optimizer="sgd")
    yield Case(model="gpt2", precision="bf16", words="accumulation", accumulation=4)
    yield Case(model="llama", precision="autocast", words="recompute full", **full)
    yield Case(
        model="llama", precision="bf16", words="selective", recompute="selective"
    )
    yield Case(
        model="llama",
        precision="bf16",
        words="fsdp2, recompute full, accumulation",
        backend="fsdp2",
        accumulation=4,
        **full,
    )
    yield Case(
        model="gpt2", precision="fp32", words="momentum", optimizer="sgd-momentum"
    )
    yield Case(model="gpt2", precision="bf16", words="adafactor", optimizer="adafactor")
    yield Case(model="gpt2", precision="bf16", words="recompute full", **full)
    yield Case(model="gpt2", precision="autocast", **fsdp2)
    yield Case(
        model="gpt2",
        precision="fp32",
        words="fsdp2, no reshard",
        backend="fsdp2",
        options=keep,
    )
    yield Case(model="gpt2", precision="autocast", words="accumulation", accumulation=4)
    yield Case(
        model="llama",
        precision="bf16",
        words="fused, recompute full",
        optimizer="adamw-fused",
        **full,
    )
    yield Case(
        model="gpt2",
        precision="bf16",
        words="fsdp2 on cpu",
        backend="fsdp2",
        options={"offload": _CPU},
    )
    yield Case(model="llama", precision="fp32", words="recompute full", **full)
