"""What a plan says to Horovod."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bigmodel.errors import Violation
from bigmodel.plans.options.checks import one_of, positive

HorovodCompression = Literal["none", "fp16"]
"""How gradients travel: as they are, or as float16 (`Compression.fp16`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HorovodOptions:
    """Horovod is configured by its environment; the launcher sets it from here."""

    fusion_megabytes: float = 128.0
    """`HOROVOD_FUSION_THRESHOLD`, in MiB; Horovod's default is 128."""
    compression: HorovodCompression = "none"

    def violations(self) -> Iterator[Violation]:
        """Yield what can never be right."""
        yield from positive("horovod.fusion_megabytes", self.fusion_megabytes)
        yield from one_of("horovod.compression", self.compression, HorovodCompression)
