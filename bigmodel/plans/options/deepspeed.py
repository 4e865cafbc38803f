"""What a plan says to DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bigmodel.errors import Violation
from bigmodel.plans.options.checks import not_negative, one_of, positive

GradientType = Literal["float32", "weights"]
"""fp32, or the element type of the weights that compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """Names and units are those of DeepSpeed's configuration, where it has them."""

    bucket_elements: int = 500_000_000
    """`reduce_bucket_size` and `allgather_bucket_size`, in elements. Release 0.19
    gathers weights in one go, whatever the latter says."""
    overlap_comm: bool | None = None
    """Reduce gradients while backward computes, which takes a second bucket under
    stages 1 and 2; None: DeepSpeed's own choice, which is stage 3 only."""
    prefetch_bucket_size: int = 50_000_000
    """Stage 3: elements of weights that are gathered ahead."""
    param_persistence_threshold: int = 100_000
    """Stage 3: parameters of at most this many elements are whole on every rank."""
    max_live_parameters: int = 1_000_000_000
    """Stage 3: elements of gathered weights beyond which nothing is gathered ahead.
    Weights of a unit are predicted as if they were there together, which is too much
    where this or the next limit is smaller than a unit."""
    max_reuse_distance: int = 1_000_000_000
    """Stage 3: weights that are needed again within this many elements are kept."""
    sub_group_size: int = 1_000_000_000
    """Stage 3: elements of shards that take the optimizer's step together."""
    zero_hpz_partition_size: int = 1
    """Stage 3, ZeRO++: ranks of a group, best a machine, that keep a second copy of the
    weights in shards of their own for backward; 1: none."""
    zero_quantized_weights: bool = False
    """Stage 3, ZeRO++: gather weights in 8 bits. CUDA only."""
    zero_quantized_gradients: bool = False
    """Stage 3, ZeRO++: reduce gradients in 4 bits. CUDA only."""
    grad_accum_dtype: GradientType | None = None
    """Element type in which gradients of micro-batches add up. None: float32 under
    stages 2 and 3, whatever the weights are; under stage 1 that of the weights, because
    DeepSpeed has another optimizer, not ZeRO's, for bfloat16 weights and fp32 sums."""
    communication_data_type: GradientType = "weights"
    """Element type in which gradients are reduced."""
    find_unused: bool = False
    """Stages 1 and 2: count a gradient as zero where a rank does not use a parameter
    that others use. All are then reduced after the last backward. Without it DeepSpeed
    aborts or hangs."""

    def violations(self) -> Iterator[Violation]:
        """Yield what can never be right."""
        yield from positive("deepspeed.bucket_elements", self.bucket_elements)
        yield from positive("deepspeed.sub_group_size", self.sub_group_size)
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
        ):
            yield from not_negative(f"deepspeed.{name}", getattr(self, name))
        yield from positive(
            "deepspeed.zero_hpz_partition_size", self.zero_hpz_partition_size
        )
        for name in ("grad_accum_dtype", "communication_data_type"):
            value = getattr(self, name)
            if value is not None or name == "communication_data_type":
                yield from one_of(f"deepspeed.{name}", value, GradientType)
