"""The DeepSpeed configuration that says what a plan of a pipeline says."""

from __future__ import annotations

from typing import Any

from bigmodel.plans import Plan

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def pipeline_config(plan: Plan, clip_norm: float | None) -> dict[str, Any]:
    """Return the content of a DeepSpeed configuration file.

    Args:
        plan: A plan of backend `deepspeed_pipeline`.
        clip_norm: Largest global norm of the gradients; None: no clipping.
    """
    weights = _SHORT[plan.number_format.weights]
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.zero_stage:
        buckets = plan.deepspeed.bucket_elements
        zero |= {
            "reduce_bucket_size": buckets,
            # DeepSpeed refuses odd numbers here, though it never uses them.
            "allgather_bucket_size": buckets + buckets % 2,
            "overlap_comm": False,
            "contiguous_gradients": True,
        }
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "zero_optimization": zero,
        # The optimizer is the user's, whichever it is.
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": plan.precision == "bf16"},
        "fp16": {
            # As the other backends do: halve at once, double after 2,000 steps.
            "enabled": plan.precision == "fp16",
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
            "min_loss_scale": 1,
        },
        "data_types": {"grad_accum_dtype": weights},
        "communication_data_type": weights,
        # 0 is DeepSpeed's word for no clipping.
        "gradient_clipping": 0.0 if clip_norm is None else clip_norm,
        # Or it prints the first step's loss.
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
