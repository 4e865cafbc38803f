"""The DeepSpeed configuration that says what a plan says."""

from __future__ import annotations

from typing import Any

from bigmodel.plans import Plan

_NEVER = 1_000_000_000
"""Steps between two prints of DeepSpeed; it has no way to switch them off."""


def deepspeed_config(plan: Plan, clip_norm: float | None) -> dict[str, Any]:
    """Return the content of a DeepSpeed configuration file.

    Precision `autocast` is not in it: DeepSpeed's own `torch_autocast` sends gradients
    of linear layers in bfloat16, while the plan keeps gradients in fp32; the engine
    applies torch's autocast inside the model instead.

    Args:
        plan: A plan of backend `deepspeed`.
        clip_norm: Largest global norm of the gradients; None: no clipping.
    """
    elements = plan.deepspeed.bucket_elements
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "zero_optimization": {
            "stage": plan.zero_stage,
            "reduce_bucket_size": elements,
            "allgather_bucket_size": elements,
            # DeepSpeed's own defaults, spelled out because they decide how many
            # buckets are alive.
            "overlap_comm": plan.zero_stage == 3,
            "contiguous_gradients": True,
        },
        # The optimizer is the user's, whichever it is.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": plan.precision == "bf16"},
        # 0 is DeepSpeed's word for no clipping.
        "gradient_clipping": 0.0 if clip_norm is None else clip_norm,
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
    }
