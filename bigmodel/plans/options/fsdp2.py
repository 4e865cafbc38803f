"""What a plan says to `fully_shard`, torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bigmodel.errors import Violation
from bigmodel.plans.options.checks import one_of

ReduceType = Literal["float32", "bfloat16"]
"""Element type of gradients on their way to shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Options:
    """Also read by backend `pipeline` for the shards of a stage."""

    reshard_after_forward: bool | int = True
    """Free gathered weights after forward (ZeRO-3), keep them (ZeRO-2), or reshard
    them to a smaller group of this many ranks."""
    prefetch: int = 1
    """Blocks whose weights are gathered ahead of the one that computes. 1 is torch's
    own order; more calls `set_modules_to_forward_prefetch` and `..._backward_...`."""
    reduce_dtype: ReduceType = "float32"
    """Element type in which gradients are reduced; `bfloat16` sends half the bytes and
    rounds, where weights are bfloat16 too."""
    postpone_reduction: bool = False
    """Reduce gradients after the last micro-batch only, which sends less and keeps
    whole gradients meanwhile: `set_requires_gradient_sync(False)` until then."""
    ignored: tuple[str, ...] = ()
    """Module paths whose parameters are left whole on every rank."""
    methods: tuple[str, ...] = ()
    """Methods other than `forward` that may be called from outside, by path, such as
    `encode` or `decoder.generate_step`: `register_fsdp_forward_method`."""

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
        if isinstance(self.prefetch, bool) or self.prefetch < 1:
            yield Violation(
                field="fsdp2.prefetch",
                got=self.prefetch,
                rule="it is a number of blocks, at least 1: torch always gathers the "
                "next one ahead",
            )
        yield from one_of("fsdp2.reduce_dtype", self.reduce_dtype, ReduceType)
        for name in ("ignored", "methods"):
            for path in getattr(self, name):
                if not path or path.startswith(".") or path.endswith("."):
                    yield Violation(
                        field=f"fsdp2.{name}",
                        got=path,
                        rule="it must be a path such as 'decoder.embed', relative to "
                        "the model",
                    )
