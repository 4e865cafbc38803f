"""What a plan says to `fully_shard`, torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigmodel.errors import Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Options:
    """Also read by backend `pipeline` for the shards of a stage."""

    reshard_after_forward: bool | int = True
    """Free gathered weights after forward (ZeRO-3), keep them (ZeRO-2), or reshard
    them to a smaller group of this many ranks."""

    def violations(self) -> Iterator[Violation]:
        """Yield what can never be right."""
        size = self.reshard_after_forward
        if not isinstance(size, bool) and size < 2:
            yield Violation(
                field="fsdp2.reshard_after_forward",
                got=size,
                rule="it is True, False, or the number of ranks to reshard to, at "
                "least 2",
            )
