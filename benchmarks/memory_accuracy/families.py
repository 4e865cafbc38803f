"""Small models of many kinds: what attention, experts, convolutions and skips hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ConvNextConfig,
    ConvNextForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 512
PIXELS = 64
CLASSES = 10


def llama() -> nn.Module:
    """Grouped-query attention, 3.1 M parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
    )


def frozen() -> nn.Module:
    """The same with its embedding and first half frozen."""
    model = llama()
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    return model


def lora() -> nn.Module:
    """The same with adapters of peft; only they train."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(llama(), config)


def mixtral() -> nn.Module:
    """Four experts, two for each token."""
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            num_local_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    """An encoder with dropout."""
    return BertForMaskedLM(
        BertConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
        )
    )


def t5() -> nn.Module:
    """An encoder and a decoder."""
    return T5ForConditionalGeneration(
        T5Config(
            d_model=256,
            d_ff=512,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=4,
            d_kv=64,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def mamba() -> nn.Module:
    """A state-space model: no attention."""
    return MambaForCausalLM(
        MambaConfig(
            hidden_size=128,
            num_hidden_layers=3,
            vocab_size=VOCABULARY,
            use_cache=False,
            use_mambapy=False,
        )
    )


def vit() -> nn.Module:
    """Patches of images as tokens."""
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=192,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=PIXELS,
            patch_size=8,
            num_labels=CLASSES,
        )
    )


def resnet() -> nn.Module:
    """Convolutions and batch norms."""
    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=32,
            hidden_sizes=[64, 128, 256, 512],
            depths=[2, 2, 2, 2],
            num_labels=CLASSES,
        )
    )


def convnext() -> nn.Module:
    """Depthwise convolutions."""
    return ConvNextForImageClassification(
        ConvNextConfig(
            hidden_sizes=[32, 64, 128, 256],
            depths=[2, 2, 4, 2],
            num_labels=CLASSES,
            image_size=PIXELS,
        )
    )


class UNet(nn.Module):
    """Every block's output is needed again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 32, 64, 128]
        pairs = list(pairwise(widths))
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(_down(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(
            _up(wide if index == 0 else 2 * wide, narrow)
            for index, (narrow, wide) in enumerate(reversed(pairs))
        )
        self.last = nn.Conv2d(2 * widths[0], 3, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return an image of the same size."""
        hidden, skips = self.first(image), []
        for block in self.down:
            skips.append(hidden)
            hidden = block(hidden)
        for block in self.up:
            hidden = nn.functional.interpolate(block(hidden), scale_factor=2)
            hidden = torch.cat([hidden, skips.pop()], dim=1)
        return self.last(hidden)


def _down(narrow: int, wide: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(narrow, wide, 3, padding=1),
        nn.GroupNorm(4, wide),
        nn.SiLU(),
        nn.Conv2d(wide, wide, 3, stride=2, padding=1),
    )


def _up(wide: int, narrow: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(wide, narrow, 3, padding=1), nn.GroupNorm(4, narrow), nn.SiLU()
    )


def uneven() -> nn.Module:
    """An MLP whose layers have from 2 to 131 thousand parameters."""
    widths = [384, 2048, 64, 2048, 32, 1024, CLASSES]
    layers: list[nn.Module] = []
    for narrow, wide in pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def tokens(samples: int) -> dict[str, torch.Tensor]:
    """128 random tokens a sample."""
    return _tokens(samples, 128)


def long_tokens(samples: int) -> dict[str, torch.Tensor]:
    """256 random tokens a sample."""
    return _tokens(samples, 256)


def short_tokens(samples: int) -> dict[str, torch.Tensor]:
    """16 random tokens a sample: a state-space model on a CPU steps through them."""
    return _tokens(samples, 16)


def _tokens(samples: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (samples, length))
    return {"input_ids": ids, "labels": ids.clone()}


def images(samples: int) -> dict[str, torch.Tensor]:
    """Random images and classes."""
    return {
        "pixel_values": torch.randn(samples, 3, PIXELS, PIXELS),
        "labels": torch.randint(0, CLASSES, (samples,)),
    }


def image_pairs(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images, and what is to become of them."""
    shape = (samples, 3, PIXELS, PIXELS)
    return torch.randn(shape), torch.randn(shape)


def features(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random features and classes."""
    return torch.randn(samples, 384), torch.randint(0, CLASSES, (samples,))


def image_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Mean squared difference from the second entry of the batch."""
    return nn.functional.mse_loss(output, batch[1])


def class_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Cross-entropy against the second entry of the batch."""
    return nn.functional.cross_entropy(output, batch[1])


Family = tuple[
    Callable[[], nn.Module],
    Callable[[int], Any],
    Callable[[torch.Tensor, Any], torch.Tensor] | None,
]

FAMILIES: dict[str, Family] = {
    "llama": (llama, tokens, None),
    "llama-long": (llama, long_tokens, None),
    "frozen": (frozen, tokens, None),
    "lora": (lora, tokens, None),
    "mixtral": (mixtral, tokens, None),
    "bert": (bert, tokens, None),
    "t5": (t5, tokens, None),
    "mamba": (mamba, short_tokens, None),
    "vit": (vit, images, None),
    "resnet": (resnet, images, None),
    "convnext": (convnext, images, None),
    "unet": (UNet, image_pairs, image_loss),
    "uneven": (uneven, features, class_loss),
}
"""Name to module, batch of a number of samples, loss function."""
