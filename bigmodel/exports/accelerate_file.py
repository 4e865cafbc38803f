"""A plan as the configuration file of `accelerate launch`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bigmodel.backends.deepspeed.config import deepspeed_config
from bigmodel.errors import UsageError, Violation, raise_if_any
from bigmodel.exports.accelerate_rules import MIXED_PRECISION, accelerate_violations
from bigmodel.exports.commands import command_line
from bigmodel.exports.export import Export, Request
from bigmodel.plans import Plan


def accelerate_export(request: Request) -> Export:
    """Return the file, and for DeepSpeed its configuration beside it.

    Raises:
        UsageError: The file cannot say what the plan says; lists every reason.
    """
    plan = request.plan
    found = list(accelerate_violations(plan, "file"))
    beside = request.beside(".deepspeed.json")
    if plan.backend == "deepspeed" and beside is None:
        found.append(
            Violation(
                field="--out",
                got=None,
                rule="DeepSpeed's configuration is a second file, named in the first",
                cure="name the first one, such as --out plan.yaml",
            )
        )
    raise_if_any(found, UsageError)
    launch = ["accelerate", "launch", "--config_file", str(request.out or "plan.yaml")]
    notes = [
        f"start with: {command_line([*launch, request.script, *request.arguments])}",
        *_unsaid(request),
    ]
    header = "".join(f"# {note}\n" for note in (plan.describe(), *notes))
    text = header + _yaml(accelerate_config(request, beside))
    files = {}
    if plan.backend == "deepspeed" and beside is not None:
        config = deepspeed_config(plan, request.clip_norm)
        files[beside] = json.dumps(config, indent=2) + "\n"
    return Export(text=text, beside=files, notes=tuple(notes))


def accelerate_config(request: Request, deepspeed_file: str | None) -> dict[str, Any]:
    """Return the content of the file; keys are fields of accelerate's ClusterConfig.

    The kind of job is always one for GPUs: for CPUs the launcher starts one process,
    whatever the file says, unless mpirun starts them.
    """
    plan, place = request.plan, request.placement
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if plan.world > 1 else "NO",
        "num_machines": place.nodes,
        "num_processes": plan.world,
        # Of the first machine; the others add --machine_rank.
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static" if place.nodes == 1 else "c10d",
        "same_network": True,
        "use_cpu": False,
    }
    if plan.backend != "deepspeed":
        # With a DeepSpeed file accelerate takes precision from there, and refuses to
        # read it here.
        config["mixed_precision"] = MIXED_PRECISION[plan.backend, plan.precision]
    if plan.backend == "deepspeed":
        config["distributed_type"] = "DEEPSPEED"
        config["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed_file,
            "zero3_init_flag": plan.zero_stage == 3,
        }
        if place.nodes > 1:
            config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    elif plan.backend == "fsdp2":
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = {
            "fsdp_version": 2,
            # Without names: the blocks that a model of transformers does not split.
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": plan.fsdp2.reshard_after_forward,
            "fsdp_offload_params": plan.offload.parameters == "cpu",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": False,
        }
        if plan.mesh.replicate > 1:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": plan.mesh.replicate,
                "parallelism_config_dp_shard_size": plan.mesh.shard,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            }
    return config


def _unsaid(request: Request) -> Iterator[str]:
    """Yield what the script must say, because the file has no word for it."""
    plan = request.plan
    if request.placement.nodes > 1:
        yield (
            "on every machine add: --machine_rank RANK --main_process_ip FIRST_MACHINE "
            "--main_process_port 29500"
        )
    yield f"the script's DataLoader takes {plan.micro_batch} samples per process"
    if plan.accumulation > 1 and plan.backend != "deepspeed":
        yield (
            f"the script says Accelerator(gradient_accumulation_steps="
            f"{plan.accumulation}); the file cannot"
        )
    if plan.backend == "ddp":
        yield (
            "gradients lie beside DDP's buckets, one more copy of them than the plan "
            "counts, unless the script passes DistributedDataParallelKwargs("
            "gradient_as_bucket_view=True)"
        )
    if plan.backend == "fsdp2":
        yield from fsdp2_differences(plan)
        yield (
            "all ranks get rank 0's weights; each still loads its own copy before, as "
            "transformers does whatever fsdp_cpu_ram_efficient_loading says, and a "
            "model with buffers in its state (batch-norm) needs it set to false"
        )
    if request.clip_norm is not None and plan.backend != "deepspeed":
        yield (
            "the script clips: accelerator.clip_grad_norm_(model.parameters(), "
            f"{request.clip_norm})"
        )


def fsdp2_differences(plan: Plan) -> Iterator[str]:
    """Yield where accelerate's FSDP2, told by file or by Trainer, is not the plan's."""
    if plan.number_format.masters:
        yield (
            "outputs of the model, and so its loss, come in half precision; those of "
            "bigmodel.accelerator(plan) do so only where the model itself rounds them"
        )
        if plan.fsdp2.reduce_dtype == "float32":
            yield (
                "gradients are summed over ranks in half precision, which the plan "
                "does in fp32; bigmodel.accelerator(plan) does as the plan says"
            )
    if plan.accumulation > 1 and not plan.fsdp2.postpone_reduction:
        yield (
            "whole gradients are kept until the last micro-batch, while the plan "
            "reduces each to shards; bigmodel.accelerator(plan) does as the plan says"
        )
    yield (
        "embedding and head are groups of their own, which the plan's prediction "
        "counts with the rest of the model"
    )


def _yaml(config: Mapping[str, Any], indent: str = "") -> str:
    """Write a document of nested mappings; JSON's scalars are YAML's."""
    lines = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)
