"""What trains under each name in the library's table of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
}
"""By name, what makes it from parameters and a learning rate."""
