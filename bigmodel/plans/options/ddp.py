"""What a plan says to DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigmodel.errors import Violation
from bigmodel.plans.options.checks import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpOptions:
    """Also read by backend `pipeline` for the replicas of a stage."""

    bucket_megabytes: float = 25.0
    """`bucket_cap_mb` (MiB); torch's default is 25."""
    gradient_views: bool = True
    """`gradient_as_bucket_view`: gradients live in the buckets."""

    def violations(self) -> Iterator[Violation]:
        """Yield what can never be right."""
        yield from positive("ddp.bucket_megabytes", self.bucket_megabytes)
