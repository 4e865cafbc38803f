"""Models of transformers from their configs: built without weights and without network.

transformers is imported here and in `huggingface.py` only, and only when it is needed.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from bigmodel.errors import MissingDependencyError, UsageError
from bigmodel.models.published import SampleKind

_SUFFIXES: dict[str, SampleKind] = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForConditionalGeneration": "seq2seq",
    "ForImageClassification": "image",
}
_AUTO_CLASSES: dict[SampleKind, tuple[str, str]] = {
    # Masked models before causal ones: every BERT can also be built as a decoder.
    "seq2seq": (
        "AutoModelForSeq2SeqLM",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    ),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "image": (
        "AutoModelForImageClassification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    ),
}


def is_config(value: object) -> bool:
    """Say whether a value is a config of transformers, without importing it."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(value, library.PretrainedConfig)


def config_of(model: nn.Module) -> Any:
    """Return the config of a model of transformers; None for any other object."""
    library = sys.modules.get("transformers")
    if library is not None and isinstance(model, library.PreTrainedModel):
        return model.config
    return None


def read_config(path: Path) -> Any:
    """Read a config.json, or the one in a folder.

    Raises:
        UsageError: There is none, or it is no config of a model that is known.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"the folder {str(path)!r} holds no config.json; "
            "give the folder of a model of transformers, or the file itself"
        )
    try:
        settings = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"cannot read the config {str(file)!r}: {error}") from None
    if not isinstance(settings, dict) or not isinstance(
        settings.get("model_type"), str
    ):
        raise UsageError(
            f"{str(file)!r} is no config of a model of transformers: "
            "it has no entry 'model_type'"
        )
    return make_config(settings, str(file))


def make_config(settings: Mapping[str, Any], source: str) -> Any:
    """Build a config from what a config.json says; `source` names it in errors.

    Raises:
        MissingDependencyError: transformers is not installed.
        UsageError: transformers does not know the model type, or refuses a value.
    """
    library = _transformers()
    arguments = {key: value for key, value in settings.items() if key != "model_type"}
    model_type = settings["model_type"]
    if model_type not in library.CONFIG_MAPPING:
        cure = (
            "it brings its own code: build the model yourself and pass it"
            if "auto_map" in settings
            else "a newer transformers may have it, or build the model yourself"
        )
        raise UsageError(
            f"{source}: transformers {library.__version__} has no model type "
            f"{model_type!r}; {cure}"
        )
    try:
        return library.AutoConfig.for_model(model_type, **arguments)
    except Exception as error:
        raise UsageError(f"{source}: transformers refuses it: {error}") from error


def kind_of(config: Any, class_name: str | None = None) -> SampleKind:
    """Return what the model of a config reads.

    Args:
        config: A config of transformers.
        class_name: The class of the model, where there is one already.

    Raises:
        UsageError: It is no kind of model for which a sample can be made up.
    """
    names = [class_name] if class_name else list(config.architectures or ())
    for name in names:
        for suffix, kind in _SUFFIXES.items():
            if name.endswith(suffix):
                return kind
    if not names:
        from transformers.models.auto import modeling_auto

        for kind, (_, mapping) in _AUTO_CLASSES.items():
            if config.model_type in getattr(modeling_auto, mapping):
                return kind
    what = names[0] if names else f"model type {config.model_type!r}"
    raise UsageError(
        f"{what} is no causal, masked or sequence-to-sequence language model and no "
        "image classifier; pass the model, or a function that makes it, "
        "and a sample batch"
    )


def factory_for(config: Any, kind: SampleKind) -> Callable[[], nn.Module]:
    """Return a function that builds the model of a config without its weights.

    The weights hold what the memory held: to be built on fake tensors.
    """
    library = _transformers()
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(config)
    # A training step keeps no keys and values.
    config.use_cache = False
    auto_class = getattr(library, _AUTO_CLASSES[kind][0])

    def build() -> nn.Module:
        with no_init_weights():
            model = auto_class.from_config(config, dtype=torch.float32)
        # Left out together with the initialisation.
        model.tie_weights()
        if kind == "causal-lm" and model.loss_type is None:
            # What it falls back to, with a warning, for GPT2LMHeadModel.
            model.loss_type = "ForCausalLM"
        return model

    return build


def positions_of(config: Any) -> int | None:
    """Return the longest sequence that the model has positions for; None: no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(
            "transformers", "hf", "a model by name or by config"
        ) from None
    return transformers
