"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783)."""

from bigmodel.models.published.table import add

# name, repository, layers, hidden, feed-forward, heads, key-value heads
_LLAMA_2 = (
    ("llama-2-7b", "meta-llama/Llama-2-7b-hf", 32, 4096, 11008, 32, 32),
    ("llama-2-13b", "meta-llama/Llama-2-13b-hf", 40, 5120, 13824, 40, 40),
    ("llama-2-70b", "meta-llama/Llama-2-70b-hf", 80, 8192, 28672, 64, 8),
)
_LLAMA_3 = (
    ("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 32, 4096, 14336, 32, 8),
    ("llama-3-70b", "meta-llama/Meta-Llama-3-70B", 80, 8192, 28672, 64, 8),
)
_LLAMA_31 = (
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 32, 4096, 14336, 32, 8),
    ("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 80, 8192, 28672, 64, 8),
    ("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 126, 16384, 53248, 128, 8),
)
_ROPE_31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

for _rows, _vocabulary, _positions, _rope, _length in (
    (_LLAMA_2, 32000, 4096, {"rope_type": "default", "rope_theta": 10000.0}, 4096),
    (_LLAMA_3, 128256, 8192, {"rope_type": "default", "rope_theta": 500000.0}, 8192),
    (_LLAMA_31, 128256, 131072, _ROPE_31, 8192),
):
    for _name, _source, _layers, _hidden, _inner, _heads, _groups in _rows:
        add(
            _name,
            "LlamaForCausalLM",
            {
                "model_type": "llama",
                "vocab_size": _vocabulary,
                "max_position_embeddings": _positions,
                "num_hidden_layers": _layers,
                "hidden_size": _hidden,
                "intermediate_size": _inner,
                "num_attention_heads": _heads,
                "num_key_value_heads": _groups,
                "rms_norm_eps": 1e-5,
                "rope_parameters": _rope,
                "tie_word_embeddings": False,
            },
            default_length=_length,
            source=_source,
        )
