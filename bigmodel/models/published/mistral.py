"""Mistral 7B and Mixtral 8x7B (arXiv 2310.06825, 2401.04088)."""

from bigmodel.models.published.table import add

_SHARED = {
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

add(
    "mistral-7b",
    "MistralForCausalLM",
    {
        "model_type": "mistral",
        **_SHARED,
        "sliding_window": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    default_length=4096,
    source="mistralai/Mistral-7B-v0.1",
)
add(
    "mixtral-8x7b",
    "MixtralForCausalLM",
    {
        "model_type": "mixtral",
        **_SHARED,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    default_length=4096,
    source="mistralai/Mixtral-8x7B-v0.1",
)
