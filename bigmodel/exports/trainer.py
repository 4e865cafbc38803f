"""A plan as keywords of transformers' TrainingArguments (transformers 5)."""

from __future__ import annotations

import json
from typing import Any

from bigmodel.backends.deepspeed.config import deepspeed_config
from bigmodel.errors import UsageError, Violation, raise_if_any
from bigmodel.exports.accelerate_file import fsdp2_differences
from bigmodel.exports.accelerate_rules import MIXED_PRECISION, accelerate_violations
from bigmodel.exports.export import Device, Export, Request
from bigmodel.plans import Plan


def trainer_export(request: Request) -> Export:
    """Return the keywords as a JSON file."""
    keywords = training_arguments(
        request.plan, clip_norm=request.clip_norm, device=request.device
    )
    file = str(request.out or "trainer.json")
    notes = [
        "use with: TrainingArguments(output_dir=..., learning_rate=..., "
        f"**json.load(open({file!r})))",
        f"start {request.plan.world} processes, with torchrun",
    ]
    if request.plan.backend == "fsdp2":
        notes += fsdp2_differences(request.plan)
    return Export(text=json.dumps(keywords, indent=2) + "\n", notes=tuple(notes))


def training_arguments(
    plan: Plan, *, clip_norm: float | None = None, device: Device = "cuda"
) -> dict[str, Any]:
    """Return keywords for `TrainingArguments`, all of them plain data.

    Args:
        plan: A plan of backend `ddp`, `fsdp2` or `deepspeed`.
        clip_norm: Largest global norm of the gradients; None: no clipping. Trainer's
            own default is 1.
        device: Whether the job runs on GPUs or on CPUs.

    Raises:
        UsageError: Trainer cannot be told what the plan says; lists every reason.
    """
    found = list(accelerate_violations(plan, "trainer"))
    if not found and device == "cpu":
        found += _on_cpu(plan)
    raise_if_any(found, UsageError)
    precision = MIXED_PRECISION[plan.backend, plan.precision]
    keywords: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        # 0 is Trainer's word for no clipping.
        "max_grad_norm": 0.0 if clip_norm is None else clip_norm,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": device == "cpu",
    }
    if device == "cpu" and plan.world > 1:
        keywords["ddp_backend"] = "gloo"
    if "full" in plan.recompute:
        keywords["activation_checkpointing"] = True
        keywords["activation_checkpointing_kwargs"] = {"use_reentrant": False}
    if plan.backend == "ddp":
        keywords |= {
            "ddp_bucket_cap_mb": int(plan.ddp.bucket_megabytes),
            "ddp_find_unused_parameters": plan.ddp.find_unused,
            "ddp_static_graph": plan.ddp.static_graph,
        }
    elif plan.backend == "fsdp2":
        keywords["fsdp"] = True
        keywords["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": plan.fsdp2.reshard_after_forward,
            "cpu_offload": plan.offload.parameters == "cpu",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
    else:
        keywords["deepspeed"] = deepspeed_config(plan, clip_norm)
    return keywords


def _on_cpu(plan: Plan) -> list[Violation]:
    if plan.backend == "fsdp2":
        return [
            Violation(
                field="backend",
                got="fsdp2",
                rule="accelerate leaves FSDP out on CPUs without a word, and Trainer "
                "would train with DDP",
                cure="use bigmodel.prepare or bigmodel.accelerator on CPUs",
            )
        ]
    if plan.precision == "autocast-fp16":
        return [
            Violation(
                field="precision",
                got=plan.precision,
                rule="accelerate scales no losses on CPUs",
                cure="use autocast",
            )
        ]
    return []
