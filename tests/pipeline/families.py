"""Tiny models of transformers, 4 layers each, and data for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 61
LENGTH = 12
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER_DECODER = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
}


@dataclass(frozen=True)
class Family:
    model: str
    config: str
    blocks: str = "model.layers"
    settings: dict[str, Any] = field(default_factory=dict)
    decoder: str = ""
    layers: int = 4

    @property
    def units(self) -> tuple[str, ...]:
        lists = (self.blocks, self.decoder) if self.decoder else (self.blocks,)
        return tuple(
            f"{path}.{index}" for path in lists for index in range(self.layers)
        )


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig"),
    "qwen2-tied": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        settings={
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        settings={"num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", "gpt_neox.layers"),
    "bert": Family("BertForMaskedLM", "BertConfig", "bert.encoder.layer", QUIET),
    "bert-labels": Family(
        "BertForSequenceClassification", "BertConfig", "bert.encoder.layer", QUIET
    ),
    # Multiplies embeddings before its blocks.
    "granite": Family(
        "GraniteForCausalLM", "GraniteConfig", settings={"embedding_multiplier": 2.0}
    ),
    # Its final norm is defined before its blocks.
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        "model.decoder.layers",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    # The norm of its embeddings is defined after its blocks.
    "bart": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        "model.encoder.layers",
        _ENCODER_DECODER | {"d_model": 32, "dropout": 0.0},
        decoder="model.decoder.layers",
        layers=2,
    ),
}
"""Models whose stages must compute what the whole model computes."""

REFUSED = Family(
    "T5ForConditionalGeneration",
    "T5Config",
    "encoder.block",
    {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    decoder="decoder.block",
    layers=2,
)
"""Its blocks hand each other the bias of positions."""


def make_family(name: str) -> nn.Module:
    return make(FAMILIES[name])


def make(family: Family) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family.config)(
        **(SHAPE | {"num_hidden_layers": family.layers} | family.settings)
    )
    return getattr(transformers, family.model)(config)


def make_batch(name: str, samples: int, seed: int) -> dict[str, Tensor]:
    """Return samples of which some are padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    lengths = torch.arange(samples) % 4 + LENGTH - 3
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name.startswith("bert"):
        batch["token_type_ids"] = (torch.arange(LENGTH)[None] > 5).long() + 0 * ids
    if name == "bert-labels":
        batch["labels"] = ids[:, 0] % 2
    return batch
