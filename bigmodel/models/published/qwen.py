"""Qwen2.5 and Qwen3, dense models (arXiv 2412.15115, 2505.09388)."""

from bigmodel.models.published.table import add

# size, layers, hidden, feed-forward, heads, key-value heads, vocabulary, tied
_QWEN_25 = (
    ("0.5B", 24, 896, 4864, 14, 2, 151936, True),
    ("1.5B", 28, 1536, 8960, 12, 2, 151936, True),
    ("3B", 36, 2048, 11008, 16, 2, 151936, True),
    ("7B", 28, 3584, 18944, 28, 4, 152064, False),
    ("14B", 48, 5120, 13824, 40, 8, 152064, False),
    ("32B", 64, 5120, 27648, 40, 8, 152064, False),
    ("72B", 80, 8192, 29568, 64, 8, 152064, False),
)
_QWEN_3 = (
    ("0.6B", 28, 1024, 3072, 16, 8, 151936, True),
    ("1.7B", 28, 2048, 6144, 16, 8, 151936, True),
    ("4B", 36, 2560, 9728, 32, 8, 151936, True),
    ("8B", 36, 4096, 12288, 32, 8, 151936, False),
    ("14B", 40, 5120, 17408, 40, 8, 151936, False),
    ("32B", 64, 5120, 25600, 64, 8, 151936, False),
)

for _series, _class, _type, _rows, _extra, _positions in (
    ("Qwen2.5", "Qwen2ForCausalLM", "qwen2", _QWEN_25, {}, 32768),
    ("Qwen3", "Qwen3ForCausalLM", "qwen3", _QWEN_3, {"head_dim": 128}, 40960),
):
    for _size, _layers, _hidden, _inner, _heads, _groups, _vocabulary, _tied in _rows:
        add(
            f"{_series}-{_size}".lower(),
            _class,
            {
                "model_type": _type,
                "vocab_size": _vocabulary,
                "max_position_embeddings": _positions,
                "num_hidden_layers": _layers,
                "hidden_size": _hidden,
                "intermediate_size": _inner,
                "num_attention_heads": _heads,
                "num_key_value_heads": _groups,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
                "tie_word_embeddings": _tied,
                **_extra,
            },
            default_length=4096,
            source=f"Qwen/{_series}-{_size}",
        )
