"""Parameter groups as most recipes have them: norms and biases without weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of the trained parameters, for any optimizer of torch.

        optimizer = torch.optim.AdamW(bigmodel.decay_groups(model, 0.1), lr=3e-4)
        engine = bigmodel.prepare(plan, model, optimizer)

    Matrices, and what has more dims, decay; vectors (biases, and the weights of norms)
    do not. Frozen parameters are in neither group.

    Args:
        model: The model, whole.
        weight_decay: Of the first group.
    """
    trained = [value for value in model.parameters() if value.requires_grad]
    return [
        {
            "params": [value for value in trained if value.dim() > 1],
            "weight_decay": weight_decay,
        },
        {
            "params": [value for value in trained if value.dim() < 2],
            "weight_decay": 0.0,
        },
    ]
