"""What each precision of a plan computes and keeps, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["float32", "bfloat16", "float16"]

BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """Element types under one precision; names are those of torch."""

    weights: DType
    """Type of the weights that compute, and of the gradients that autograd makes."""
    compute: DType
    """Type of matrix products; where it is not `weights`, torch's autocast casts."""

    @property
    def autocast(self) -> bool:
        """Whether forward and loss run under torch's autocast."""
        return self.weights != self.compute

    @property
    def masters(self) -> bool:
        """Whether fp32 copies of the weights take the optimizer's step."""
        return self.weights != "float32"

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, because small gradients would vanish."""
        return self.compute == "float16"

    @property
    def weight_bytes(self) -> int:
        """Bytes of one element of the weights that compute."""
        return BYTES[self.weights]


NUMBER_FORMATS: dict[str, NumberFormat] = {
    "fp32": NumberFormat(weights="float32", compute="float32"),
    "bf16": NumberFormat(weights="bfloat16", compute="bfloat16"),
    "fp16": NumberFormat(weights="float16", compute="float16"),
    "autocast": NumberFormat(weights="float32", compute="bfloat16"),
    "autocast-fp16": NumberFormat(weights="float32", compute="float16"),
}
"""From `Plan.precision` to its row."""
