"""What a plan says to DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bigmodel.errors import Violation
from bigmodel.plans.options.checks import one_of, positive

CommunicationHook = Literal["none", "fp16", "bf16", "powersgd"]
"""How buckets travel: as they are, as half precision, or as two factors of low rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpOptions:
    """Also read by backend `pipeline` for the replicas of a stage."""

    bucket_megabytes: float = 25.0
    """`bucket_cap_mb` (MiB); torch's default is 25."""
    first_bucket_megabytes: float | None = None
    """Cap of the bucket that is sent first (MiB); None: the same as of the others."""
    gradient_views: bool = True
    """`gradient_as_bucket_view`: gradients live in the buckets."""
    static_graph: bool = False
    """The same parameters are used, in the same way, in every step."""
    find_unused: bool = False
    """`find_unused_parameters`: look in every step for those without gradient."""
    hook: CommunicationHook = "none"
    """torch's communication hook. `fp16` and `bf16` send half the bytes and round;
    `powersgd` sends factors and keeps what they miss for the next step."""
    powersgd_rank: int = 1
    """Columns of PowerSGD's factors."""
    powersgd_start: int = 1000
    """Steps before PowerSGD sets in; at least 2, because it reads the buckets that DDP
    has rebuilt after the first one."""

    def violations(self) -> Iterator[Violation]:
        """Yield what can never be right."""
        yield from positive("ddp.bucket_megabytes", self.bucket_megabytes)
        if self.first_bucket_megabytes is not None:
            yield from positive(
                "ddp.first_bucket_megabytes", self.first_bucket_megabytes
            )
        yield from one_of("ddp.hook", self.hook, CommunicationHook)
        yield from positive("ddp.powersgd_rank", self.powersgd_rank)
        if self.powersgd_start < 2:
            yield Violation(
                field="ddp.powersgd_start",
                got=self.powersgd_start,
                rule="PowerSGD can set in after 2 steps at the earliest",
            )
        if self.static_graph and self.find_unused:
            yield Violation(
                field="ddp.find_unused",
                got=True,
                rule="a static graph already knows its unused parameters",
                cure="set one of ddp.static_graph and ddp.find_unused",
            )
