"""Small traced models and the clusters that the laws are tried on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.clusters import Cluster, Link, Node
from bigmodel.clusters.notation import from_table
from bigmodel.models import ModelSpec


def tiny_gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=8,
            n_embd=64,
            n_head=4,
            vocab_size=256,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=8,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            use_cache=False,
        )
    )


def tiny_mlp() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))

    return nn.Sequential(*(block() for _ in range(8)))


def mlp_loss(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


def trace_tokens(make: Callable[[], nn.Module], precision: str) -> ModelSpec:
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    return bigmodel.trace(make, batch, precision=precision)


def trace_mlp(precision: str) -> ModelSpec:
    batch = (torch.zeros(2, 96), torch.zeros(2, 96))
    return bigmodel.trace(tiny_mlp, batch, precision=precision, loss=mlp_loss)


class Specs(dict[tuple[str, str], ModelSpec]):
    """Models by name and precision, traced when they are first asked for."""

    def __missing__(self, key: tuple[str, str]) -> ModelSpec:
        name, precision = key
        if name == "mlp":
            self[key] = trace_mlp(precision)
        else:
            make = {"gpt": tiny_gpt, "llama": tiny_llama}[name]
            self[key] = trace_tokens(make, precision)
        return self[key]


@pytest.fixture(scope="session")
def specs() -> Specs:
    """Models gpt, llama and mlp in any precision."""
    return Specs()


@pytest.fixture(scope="session")
def cluster_of() -> Callable[[int], Cluster]:
    """One machine with any number of A100."""
    return _cluster_of


def _cluster_of(world: int) -> Cluster:
    node = from_table(f"{world}xA100-40GB").node
    return Cluster(
        name=f"{world}xA100",
        node=Node(device=node.device, count=world, link=node.link),
        link=Link(bandwidth=25e9, latency=1e-5),
    )
