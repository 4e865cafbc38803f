"""Vision transformers (arXiv 2010.11929) with 1000 classes."""

from bigmodel.models.published.table import add

for _size, _layers, _hidden, _inner, _heads, _patch, _source in (
    ("base", 12, 768, 3072, 12, 16, "google/vit-base-patch16-224"),
    ("large", 24, 1024, 4096, 16, 16, "google/vit-large-patch16-224"),
    ("huge", 32, 1280, 5120, 16, 14, "google/vit-huge-patch14-224-in21k"),
):
    add(
        f"vit-{_size}",
        "ViTForImageClassification",
        {
            "model_type": "vit",
            "num_hidden_layers": _layers,
            "hidden_size": _hidden,
            "intermediate_size": _inner,
            "num_attention_heads": _heads,
            "patch_size": _patch,
            "image_size": 224,
            "num_channels": 3,
            "num_labels": 1000,
        },
        kind="image",
        default_length=1,
        source=_source,
    )
