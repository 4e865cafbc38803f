"""GPT-2 (Radford et al. 2019)."""

from bigmodel.models.published.table import add

for _name, _layers, _hidden, _heads in (
    ("gpt2", 12, 768, 12),
    ("gpt2-medium", 24, 1024, 16),
    ("gpt2-large", 36, 1280, 20),
    ("gpt2-xl", 48, 1600, 25),
):
    add(
        _name,
        "GPT2LMHeadModel",
        {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_layer": _layers,
            "n_embd": _hidden,
            "n_head": _heads,
        },
        default_length=1024,
        source=f"openai-community/{_name}",
    )
