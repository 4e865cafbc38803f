"""What may stand where a model is named, and what is made of it.

a torch.nn.Module        read as it is, never changed
a function               called under fake tensors; it returns the module
a config                 of transformers
a path                   of a config.json, or of a folder that holds one
a name                   of the table of published models: `llama-3.1-8b`, `gpt2`; its
repository on the Hub (`meta-llama/Llama-3.1-8B`) means the same

Nothing is ever downloaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bigmodel.errors import UnknownNameError, UsageError
from bigmodel.models.published import PUBLISHED, PublishedModel
from bigmodel.observe.config_models import (
    config_of,
    factory_for,
    is_config,
    kind_of,
    make_config,
    read_config,
)
from bigmodel.observe.made_up_batches import make_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model that can be traced, with a sample batch."""

    model: nn.Module | Callable[[], nn.Module]
    batch: Any
    name: str
    source: str
    """Where the model comes from."""


def resolve(model: object, batch: Any = None, *, seq_len: int | None = None) -> Subject:
    """Return the model that a user named, with a sample batch.

    Args:
        model: One of the things that the table above lists.
        batch: A sample batch of the user's; None: one is made up for language models
            and image classifiers of transformers.
        seq_len: Tokens of a sample that is made up.

    Raises:
        UsageError: It is no model, there is no sample batch and none can be made up,
            or the sequence is too long for the model.
        UnknownNameError: A name that is not in the table; lists the known ones.
        MissingDependencyError: transformers is needed and not installed.
    """
    if batch is not None and seq_len is not None:
        raise UsageError(
            "there is a sample batch and seq_len; a batch has its length already: "
            "give one of them"
        )
    if isinstance(model, (str, Path)):
        return _from_text(model, batch, seq_len)
    if is_config(model):
        return _from_config(model, batch, seq_len, "a config object")
    if isinstance(model, nn.Module):
        return _from_module(model, batch, seq_len)
    if callable(model):
        made = model.func if isinstance(model, functools.partial) else model
        name = getattr(made, "__name__", type(made).__name__)
        if batch is None:
            raise UsageError(_no_batch("a function that makes a model"))
        return _subject(model, batch, name.strip("<>"), "a function")
    raise UsageError(
        f"a {type(model).__name__} is no model; give a torch.nn.Module, a function "
        "that makes one, a config of transformers, the path of a config.json, or a "
        f"name such as 'llama-3.1-8b' (known: {', '.join(PUBLISHED.names())})"
    )


def _from_module(model: nn.Module, batch: Any, seq_len: int | None) -> Subject:
    name = type(model).__name__
    if batch is None:
        config = config_of(model)
        if config is None:
            raise UsageError(_no_batch(f"the module {name}"))
        batch = make_batch(config, kind_of(config, name), seq_len)
    return _subject(model, batch, name, "a module")


def _from_text(text: str | Path, batch: Any, seq_len: int | None) -> Subject:
    row = None if isinstance(text, Path) else _find_published(text)
    if row is not None:
        config = make_config(row.settings, row.name)
        return _subject(
            factory_for(config, row.kind),
            make_batch(config, row.kind, seq_len, row.default_length)
            if batch is None
            else batch,
            row.name,
            row.source,
        )
    path = Path(text).expanduser()
    if path.exists():
        return _from_config(read_config(path), batch, seq_len, str(path))
    if isinstance(text, Path) or "/" in text or "\\" in text or text.endswith(".json"):
        raise UsageError(
            f"there is no file or folder {str(text)!r}, and nothing is downloaded; "
            "give the path of a config.json, or one of the names "
            f"{', '.join(PUBLISHED.names())}"
        )
    raise UnknownNameError("model", text, PUBLISHED.names())


def _find_published(text: str) -> PublishedModel | None:
    wanted = text.strip().lower()
    for name, row in PUBLISHED:
        if wanted == name or f"/{wanted}/blob/" in row.source.lower():
            return row
    return None


def _from_config(config: Any, batch: Any, seq_len: int | None, source: str) -> Subject:
    kind = kind_of(config)
    if batch is None:
        batch = make_batch(config, kind, seq_len)
    return _subject(factory_for(config, kind), batch, config.model_type, source)


def _subject(model: Any, batch: Any, name: str, source: str) -> Subject:
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        # The tokenizers' BatchEncoding is a mapping that pytree takes for a leaf.
        batch = dict(batch)
    return Subject(model=model, batch=batch, name=name, source=source)


def _no_batch(what: str) -> str:
    return (
        f"{what} needs a sample batch, which says what the model reads: "
        "pass batch=..., a tensor, or a tuple or dict of tensors with the samples "
        "in dim 0 (one sample is enough; the values do not matter)"
    )
