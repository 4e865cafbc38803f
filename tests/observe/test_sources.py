"""What may stand where a model is named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tiny_models import LossNet, tokens

from bigmodel.errors import MissingDependencyError, UnknownNameError, UsageError
from bigmodel.observe.sources import resolve

transformers = pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.mark.parametrize("text", ["GPT2", "gpt2 ", "openai-community/gpt2"])
def test_names_in_any_spelling(text):
    subject = resolve(text, seq_len=8)
    assert subject.name == "gpt2"
    assert subject.source.startswith("https://")
    assert {key: tuple(value.shape) for key, value in subject.batch.items()} == {
        "input_ids": (1, 8),
        "labels": (1, 8),
    }
    assert all(value.dtype == torch.int64 for value in subject.batch.values())


def test_default_lengths():
    assert resolve("llama-3.1-8b").batch["input_ids"].shape == (1, 8192)
    assert resolve("vit-base").batch["pixel_values"].shape == (1, 3, 224, 224)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownNameError) as caught:
        resolve("LLAMA-3.1-8")
    message = str(caught.value)
    assert "did you mean 'llama-3.1-8b'?" in message
    assert "t5-11b" in message


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("file", ["", "config.json"])
def test_configs_on_disk(folder, file, as_text):
    path = folder / file
    subject = resolve(str(path) if as_text else path)
    assert subject.name == "llama"
    # As many tokens as it has positions for, where that is less than the default.
    assert subject.batch["input_ids"].shape == (1, 64)
    assert type(subject.model()).__name__ == "LlamaForCausalLM"


def test_a_config_object_is_not_changed():
    config = transformers.LlamaConfig(
        **{k: v for k, v in LLAMA.items() if k != "model_type"}
    )
    before = config.to_dict()
    assert resolve(config).model().config.use_cache is False
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot read the config"),
        ("[]", "no entry 'model_type'"),
        ('{"model_type": "no-such-model"}', "has no model type 'no-such-model'"),
        (
            '{"model_type": "x-own", "auto_map": {"AutoModel": "m.M"}}',
            "brings its own code",
        ),
        ('{"model_type": "clip_vision_model"}', "pass the model"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers refuses"),
    ],
)
def test_wrong_configs_are_explained(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=words):
        resolve(path)


def test_a_path_that_is_not_there(tmp_path):
    for text in ("no/such/config.json", "meta-llama/No-Such-Model", "x.json"):
        with pytest.raises(UsageError, match="nothing is downloaded"):
            resolve(text)
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        resolve(tmp_path)


def test_a_sequence_beyond_the_positions():
    with pytest.raises(UsageError, match="positions for 1024 tokens; use at most 1024"):
        resolve("gpt2", seq_len=1025)
    with pytest.raises(UsageError, match="at least 1"):
        resolve("gpt2", seq_len=0)
    with pytest.raises(UsageError, match="reads no sequence"):
        resolve("vit-base", seq_len=16)
    # Relative positions have no end.
    assert resolve("t5-small", seq_len=4096).batch["labels"].shape == (1, 4096)


def test_modules_and_functions_need_a_batch():
    with pytest.raises(UsageError, match="needs a sample batch"):
        resolve(LossNet(1))
    with pytest.raises(UsageError, match="needs a sample batch"):
        resolve(lambda: LossNet(1))
    model = LossNet(1)
    assert resolve(model, tokens()).model is model


def test_modules_of_transformers_need_none():
    config = transformers.LlamaConfig(
        **{k: v for k, v in LLAMA.items() if k != "model_type"}
    )
    model = transformers.LlamaForCausalLM(config)
    subject = resolve(model, seq_len=4)
    assert subject.model is model
    assert subject.batch["input_ids"].shape == (1, 4)


def test_a_batch_and_a_length_contradict_each_other():
    with pytest.raises(UsageError, match="give one of them"):
        resolve("gpt2", {"input_ids": tokens()}, seq_len=4)


@pytest.mark.parametrize("thing", [3, None, [1]])
def test_what_is_no_model(thing):
    with pytest.raises(UsageError, match="is no model"):
        resolve(thing, tokens())


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"bigmodel\[hf\]"):
        resolve("gpt2")


def test_importing_the_library_imports_no_torch():
    code = (
        "import sys, bigmodel; bigmodel.Plan; bigmodel.errors; dir(bigmodel); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there():
    import bigmodel

    for name in bigmodel.__all__:
        assert getattr(bigmodel, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        bigmodel.plann  # noqa: B018
