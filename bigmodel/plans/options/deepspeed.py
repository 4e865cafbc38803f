"""What a plan says to DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigmodel.errors import Violation
from bigmodel.plans.options.checks import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """Names and units are those of DeepSpeed's configuration."""

    bucket_elements: int = 500_000_000
    """`reduce_bucket_size` and `allgather_bucket_size`, in elements."""

    def violations(self) -> Iterator[Violation]:
        """Yield what can never be right."""
        yield from positive("deepspeed.bucket_elements", self.bucket_elements)
