"""transformers under fake tensors: let it take the paths that it takes in a real run.

[Note: Packed sequences]
Models of transformers look into position ids for packed sequences and build a mask of
S x S when they find any. Under fake tensors there are no values to look at, and the
mask is always built, which a real run on unpacked samples does not. While tracing, the
question is answered with no. Batches that bring an attention mask keep it: its values
are the data's business, and a materialised mask is the safe assumption.

[Note: Grouped products]
torch's grouped product multiplies the experts of a mixture. Its fake kernel takes
bfloat16 only, while the real one takes fp32 too. While tracing, other types are sent to
the operator that transformers keeps for devices without it: equal shapes, equal work.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def real_paths() -> Iterator[None]:
    """Take the paths of a real run; see the notes above."""
    with contextlib.ExitStack() as stack:
        for module, name, replace in (
            ("transformers.masking_utils", "find_packed_sequence_indices", _unpacked),
            ("transformers.integrations.moe", "_can_use_grouped_mm", _only_bfloat16),
        ):
            library = sys.modules.get(module)
            original = getattr(library, name, None)
            if original is not None:
                setattr(library, name, replace(original))
                stack.callback(setattr, library, name, original)
        yield


def _unpacked(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda position_ids: None


def _only_bfloat16(original: Callable[..., bool]) -> Callable[..., bool]:
    def can_use(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and original(input, weight, offs)

    return can_use
