"""Gemma 2 (arXiv 2408.00118)."""

from bigmodel.models.published.table import add

# size, layers, hidden, feed-forward, heads, key-value heads, head, query scale
for _size, _layers, _hidden, _inner, _heads, _groups, _head, _scale in (
    ("2b", 26, 2304, 9216, 8, 4, 256, 256),
    ("9b", 42, 3584, 14336, 16, 8, 256, 256),
    ("27b", 46, 4608, 36864, 32, 16, 128, 144),
):
    add(
        f"gemma-2-{_size}",
        "Gemma2ForCausalLM",
        {
            "model_type": "gemma2",
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "num_hidden_layers": _layers,
            "hidden_size": _hidden,
            "intermediate_size": _inner,
            "num_attention_heads": _heads,
            "num_key_value_heads": _groups,
            "head_dim": _head,
            "query_pre_attn_scalar": _scale,
            "tie_word_embeddings": True,
        },
        default_length=4096,
        source=f"google/gemma-2-{_size}",
    )
