"""The table of published models, one row each, with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bigmodel.registry import Registry

SampleKind = Literal["causal-lm", "masked-lm", "seq2seq", "image"]
"""What a model reads, and so what a sample batch for it is made of."""

HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model whose shapes were published."""

    name: str
    architecture: str
    """Class of transformers, as `architectures` of a config.json names it."""
    settings: Mapping[str, Any]
    """What config.json says about shapes: keyword arguments of the config class, and
    `model_type`. Values that are the class's defaults are left out."""
    kind: SampleKind
    default_length: int
    """Tokens of a sample when the user names no length; 1 for images."""
    source: str
    """Where the shapes were read."""


PUBLISHED: Registry[PublishedModel] = Registry("model")


def add(
    name: str,
    architecture: str,
    settings: Mapping[str, Any],
    *,
    kind: SampleKind = "causal-lm",
    default_length: int,
    source: str,
) -> None:
    """Add a row; `source` is a repository on the Hub, or an address."""
    if "://" not in source:
        source = f"{HUB}/{source}/blob/main/config.json"
    PUBLISHED.add(
        name,
        PublishedModel(
            name=name,
            architecture=architecture,
            settings=settings,
            kind=kind,
            default_length=default_length,
            source=source,
        ),
    )
