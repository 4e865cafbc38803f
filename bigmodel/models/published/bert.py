"""BERT (arXiv 1810.04805), for masked language modelling."""

from bigmodel.models.published.table import add

for _size, _layers, _hidden, _inner, _heads in (
    ("base", 12, 768, 3072, 12),
    ("large", 24, 1024, 4096, 16),
):
    add(
        f"bert-{_size}",
        "BertForMaskedLM",
        {
            "model_type": "bert",
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "num_hidden_layers": _layers,
            "hidden_size": _hidden,
            "intermediate_size": _inner,
            "num_attention_heads": _heads,
        },
        kind="masked-lm",
        default_length=512,
        source=f"google-bert/bert-{_size}-uncased",
    )
