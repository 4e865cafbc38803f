"""The DeepSpeed configuration that says what a plan says."""

from __future__ import annotations

from typing import Any

from bigmodel.backends.deepspeed.disk import state_buffers
from bigmodel.backends.deepspeed.gathering import limits_of
from bigmodel.backends.zero_types import (
    accumulation_type,
    communication_type,
    overlaps,
)
from bigmodel.models import OPTIMIZERS
from bigmodel.plans import Plan

_NEVER = 1_000_000_000
"""Steps between two prints of DeepSpeed; it has no way to switch them off."""
_TIER = {"cpu": "cpu", "disk": "nvme"}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def deepspeed_config(plan: Plan, clip_norm: float | None) -> dict[str, Any]:
    """Return the content of a DeepSpeed configuration file.

    Precision `autocast` is not in it: DeepSpeed's own `torch_autocast` sends gradients
    of linear layers in bfloat16, while the plan keeps gradients in fp32; the engine
    applies torch's autocast inside the model instead.

    Args:
        plan: A plan of backend `deepspeed`.
        clip_norm: Largest global norm of the gradients; None: no clipping.
    """
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "zero_optimization": _zero(plan),
        # The optimizer is the user's, whichever it is.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": plan.precision == "bf16"},
        "fp16": _fp16(plan),
        **_data_types(plan),
        # 0 is DeepSpeed's word for no clipping.
        "gradient_clipping": 0.0 if clip_norm is None else clip_norm,
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
    }


def _fp16(plan: Plan) -> dict[str, Any]:
    """Scale the loss as the other backends do: halve at once, double after 2,000."""
    return {
        "enabled": plan.precision == "fp16",
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 2000,
        "hysteresis": 1,
        "min_loss_scale": 1,
    }


def _zero(plan: Plan) -> dict[str, Any]:
    options = plan.deepspeed
    zero: dict[str, Any] = {
        "stage": plan.zero_stage,
        "reduce_bucket_size": options.bucket_elements,
        # DeepSpeed refuses odd numbers here, though it never uses them.
        "allgather_bucket_size": options.bucket_elements + options.bucket_elements % 2,
        # Spelled out because they decide how many buckets are alive.
        "overlap_comm": overlaps(plan),
        "contiguous_gradients": True,
    }
    if plan.zero_stage == 3:
        limits = limits_of(plan)
        zero |= {
            "stage3_prefetch_bucket_size": limits.prefetch,
            "stage3_param_persistence_threshold": options.param_persistence_threshold,
            "stage3_max_live_parameters": limits.live,
            "stage3_max_reuse_distance": limits.reuse,
            "sub_group_size": options.sub_group_size,
            "zero_hpz_partition_size": options.zero_hpz_partition_size,
            "zero_quantized_weights": options.zero_quantized_weights,
            "zero_quantized_gradients": options.zero_quantized_gradients,
        }
    for kind, key in (
        ("optimizer", "offload_optimizer"),
        ("parameters", "offload_param"),
    ):
        tier = getattr(plan.offload, kind)
        if tier != "device":
            zero[key] = {"device": _TIER[tier]}
            if tier == "disk":
                zero[key]["nvme_path"] = plan.offload.folder
    if plan.offload.optimizer == "disk":
        states = OPTIMIZERS.get(plan.optimizer).states
        zero["offload_optimizer"]["buffer_count"] = state_buffers(states)
    if plan.offload.parameters == "disk":
        # Otherwise the first 1e9 elements would stay in memory.
        zero["offload_param"]["max_in_cpu"] = 0
    return zero


def _data_types(plan: Plan) -> dict[str, Any]:
    return {
        "data_types": {"grad_accum_dtype": _SHORT[accumulation_type(plan)]},
        "communication_data_type": _SHORT[communication_type(plan)],
    }
