"""What DeepSpeed's ZeRO adds up and sends gradients in, and whether during backward."""

from __future__ import annotations

from bigmodel.plans import Plan
from bigmodel.plans.number_formats import DType


def overlaps(plan: Plan) -> bool:
    """Return whether gradients are reduced on a stream of their own.

    None is DeepSpeed's own rule (`overlap_comm_valid`, `runtime/zero/config.py`).
    """
    chosen = plan.deepspeed.overlap_comm
    return plan.zero_stage == 3 if chosen is None else chosen


def accumulation_type(plan: Plan) -> DType:
    """Return the element type in which gradients of micro-batches add up."""
    chosen = plan.deepspeed.grad_accum_dtype
    if chosen == "weights" or (chosen is None and plan.zero_stage == 1):
        return plan.number_format.weights
    return "float32"


def communication_type(plan: Plan) -> DType:
    """Return the element type in which gradients are reduced."""
    chosen = plan.deepspeed.communication_data_type
    return "float32" if chosen == "float32" else plan.number_format.weights
