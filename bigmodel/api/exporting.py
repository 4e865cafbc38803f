"""Plans for a loop or a trainer of one's own: `accelerator` and `trainer_arguments`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bigmodel.errors import (
    MissingDependencyError,
    UsageError,
    Violation,
    WorldError,
    raise_if_any,
)
from bigmodel.exports.accelerate_rules import accelerate_violations
from bigmodel.exports.export import Device
from bigmodel.exports.trainer import training_arguments
from bigmodel.plans import Plan
from bigmodel.running.environment import choose_device, publish, read_process
from bigmodel.running.plan_argument import as_plan

if TYPE_CHECKING:
    from bigmodel.exports.planned_accelerator import PlannedAccelerator


def accelerator(
    plan: object,
    *,
    clip_norm: float | None = None,
    single_copy: bool = False,
    timeout: float = 600.0,
) -> PlannedAccelerator:
    """Return an `Accelerator` of accelerate that does what a plan says.

        accelerator = bigmodel.accelerator("plan.json")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()

    Start the script with torchrun, accelerate launch, deepspeed or srun. The loader
    takes `plan.micro_batch` samples. All ranks get rank 0's weights.

    Args:
        plan: A plan of backend `ddp`, `fsdp2` or `deepspeed`, the path of a plan file,
            or what `bigmodel.plan` returned.
        clip_norm: Largest global norm of the gradients. DeepSpeed clips by itself and
            must know it here; under the others the loop calls
            `accelerator.clip_grad_norm_`.
        single_copy: No rank but 0 ever holds the whole weights. Under `fsdp2` make the
            model with `accelerator.load_once`; under `deepspeed` with ZeRO stage 3,
            make it with transformers after this call, which shards while it loads.
        timeout: Seconds after which a silent rank is an error.

    Raises:
        UsageError: accelerate cannot do what the plan says; lists every reason.
        WorldError: The processes do not match the plan.
        MissingDependencyError: accelerate is not installed.
    """
    decided = as_plan(plan)
    found = list(accelerate_violations(decided, "object"))
    if single_copy:
        found += _single_copy_violations(decided)
    process = read_process()
    device = choose_device(process)
    if not found and device.type == "cpu" and decided.number_format.scaled:
        found.append(
            Violation(
                field="precision",
                got=decided.precision,
                rule="accelerate scales no losses on CPUs",
                cure="use autocast or bf16, or train with bigmodel.prepare",
            )
        )
    raise_if_any(found, UsageError)
    if process.world_size != decided.world:
        raise WorldError(
            Violation(
                field="processes",
                got=process.world_size,
                rule=f"the plan is for {decided.world} ({decided.describe()})",
                cure=f"start {decided.world}, or plan again",
            )
        )
    try:
        from bigmodel.exports.planned_accelerator import PlannedAccelerator
    except ImportError as error:
        if error.name != "accelerate":
            raise
        raise MissingDependencyError(
            "accelerate", "accelerate", "bigmodel.accelerator"
        ) from None
    if process.world_size > 1:
        publish(process)
    return PlannedAccelerator(
        decided,
        device,
        clip_norm=clip_norm,
        single_copy=single_copy,
        timeout=timeout,
    )


def trainer_arguments(
    plan: object, *, clip_norm: float | None = None, device: Device | None = None
) -> dict[str, Any]:
    """Return keywords for transformers' `TrainingArguments`.

        arguments = TrainingArguments("out", learning_rate=1e-4,
                                      **bigmodel.trainer_arguments("plan.json"))

    Args:
        plan: As for `accelerator`.
        clip_norm: Largest global norm of the gradients; None: no clipping.
        device: `cuda` or `cpu`; None: what this process sees.

    Raises:
        UsageError: Trainer cannot do what the plan says; lists every reason.
    """
    if device is None:
        device = "cpu" if choose_device(read_process()).type == "cpu" else "cuda"
    return training_arguments(as_plan(plan), clip_norm=clip_norm, device=device)


def _single_copy_violations(plan: Plan) -> list[Violation]:
    if plan.backend == "fsdp2" or (plan.backend, plan.zero_stage) == ("deepspeed", 3):
        return []
    return [
        Violation(
            field="single_copy",
            got=True,
            rule=f"every rank holds the whole weights under {plan.describe()}",
            cure="use backend 'fsdp2', or 'deepspeed' with zero_stage=3",
        )
    ]
