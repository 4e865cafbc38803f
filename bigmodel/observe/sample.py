"""Saying what one sample of a batch is."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from bigmodel.observe.fake_model import batch_size


def describe_sample(batch: Any) -> dict[str, Any]:
    """Return the sample's description, bytes and tokens, as `ModelSpec` holds them.

    A sample of a batch of token ids (integers of two dimensions) has as many tokens as
    its first such tensor is long; any other sample counts as one.
    """
    size = batch_size(batch)
    words, count, tokens = [], 0, None
    leaves, _ = tree_flatten_with_path(batch)
    for path, leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            continue
        shape = list(leaf.shape[1:]) if leaf.shape[0] == size else list(leaf.shape)
        dtype = str(leaf.dtype).removeprefix("torch.")
        words.append(f"{keystr(path).strip('[]').strip(chr(39)) or 'x'} {dtype}{shape}")
        if leaf.shape[0] == size:
            count += leaf[:1].numel() * leaf.element_size()
        if tokens is None and leaf.dim() == 2 and not leaf.is_floating_point():
            tokens = leaf.shape[1]
    return {
        "sample": ", ".join(words),
        "sample_bytes": count,
        "tokens_per_sample": tokens or 1,
    }
