"""transformers under fake tensors: let it take the paths that it takes in a real run.

[Note: Packed sequences]
Models of transformers look into position ids for packed sequences and build a mask of
S x S when they find any. Under fake tensors there are no values to look at, and the
mask is always built, which a real run on unpacked samples does not. While tracing, the
question is answered with no. Batches that bring an attention mask keep it: its values
are the data's business, and a materialised mask is the safe assumption.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Answer that no sequences are packed; see [Note: Packed sequences]."""
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or original is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None  # pyright: ignore
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original  # pyright: ignore
