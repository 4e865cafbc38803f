"""T5 (arXiv 1910.10683); both sides of a sample get the same length."""

from bigmodel.models.published.table import add

# size, layers of each side, hidden, feed-forward, heads, head
for _size, _layers, _hidden, _inner, _heads, _head in (
    ("small", 6, 512, 2048, 8, 64),
    ("base", 12, 768, 3072, 12, 64),
    ("large", 24, 1024, 4096, 16, 64),
    ("3b", 24, 1024, 16384, 32, 128),
    ("11b", 24, 1024, 65536, 128, 128),
):
    add(
        f"t5-{_size}",
        "T5ForConditionalGeneration",
        {
            "model_type": "t5",
            "vocab_size": 32128,
            "num_layers": _layers,
            "d_model": _hidden,
            "d_ff": _inner,
            "num_heads": _heads,
            "d_kv": _head,
            "decoder_start_token_id": 0,
        },
        kind="seq2seq",
        default_length=512,
        source=f"google-t5/t5-{_size}",
    )
