"""Which options a stage does not have, and what DeepSpeed does not offload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from bigmodel.backends.deepspeed.disk import SMALLEST, state_buffers
from bigmodel.backends.offload_rules import unused_offload_violations
from bigmodel.backends.stepping import optimizer_state_bytes
from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import OPTIMIZERS, ModelSpec
from bigmodel.plans import DeepSpeedOptions, Plan
from bigmodel.units import format_bytes

_STAGE_3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "sub_group_size",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
)


def option_violations(plan: Plan) -> Iterator[Violation]:
    """Yield options without effect under the stage, and what cannot go together."""
    options, stage = plan.deepspeed, plan.zero_stage
    defaults = {field.name: field.default for field in fields(DeepSpeedOptions)}
    if stage in (1, 2):
        for name in _STAGE_3:
            if getattr(options, name) != defaults[name]:
                yield Violation(
                    field=f"deepspeed.{name}",
                    got=getattr(options, name),
                    rule=f"it would have no effect under ZeRO stage {stage}",
                    cure="leave it at its default, or use stage 3",
                )
    half = plan.number_format.masters
    if stage == 1 and half and options.grad_accum_dtype == "float32":
        yield Violation(
            field="deepspeed.grad_accum_dtype",
            got="float32",
            rule="beside 16-bit weights DeepSpeed's stage 1 adds up in fp32 only in "
            "its BF16_Optimizer, which keeps fp32 gradients of the whole model on "
            "every rank",
            cure="use stage 2, which keeps a share of them, or precision autocast",
        )
    if not half:
        for name in ("grad_accum_dtype", "communication_data_type"):
            if getattr(options, name) != defaults[name]:
                yield Violation(
                    field=f"deepspeed.{name}",
                    got=getattr(options, name),
                    rule=f"gradients are fp32 anyway under precision {plan.precision}",
                    cure="leave it at its default",
                )
    size = options.zero_hpz_partition_size
    if plan.mesh.shard % size:
        yield Violation(
            field="deepspeed.zero_hpz_partition_size",
            got=size,
            rule=f"it must divide the {plan.mesh.shard} ranks",
            cure="use the number of devices of a machine",
        )
    if options.find_unused and stage == 3:
        yield Violation(
            field="deepspeed.find_unused",
            got=True,
            rule="under stage 3 ranks gather weights together, so a branch that one of "
            "them leaves out stops all of them in its forward",
            cure="use stage 2, or let every rank run every branch",
        )
    if options.find_unused and options.overlap_comm:
        yield Violation(
            field="deepspeed.find_unused",
            got=True,
            rule="missing gradients are known after backward, so nothing is reduced "
            "during it",
            cure="leave overlap_comm out",
        )


def offload_violations(
    plan: Plan, model: ModelSpec | None, cluster: Cluster | None
) -> Iterator[Violation]:
    """Yield tiers that DeepSpeed lacks, and a host without enough memory."""
    offload = plan.offload
    yield from unused_offload_violations(plan)
    if offload.parameters != "device" and plan.zero_stage != 3:
        yield Violation(
            field="offload.parameters",
            got=offload.parameters,
            rule="DeepSpeed offloads parameters under ZeRO stage 3 only, where they "
            "are sharded",
            cure="use zero_stage=3, or offload the optimizer alone",
        )
    yield from _disk_violations(plan)
    if model is None or cluster is None or not cluster.node.host_memory:
        return
    if cluster.device.kind != "cuda":
        return
    needed = int(_host_bytes(plan, model) * cluster.node.count)
    if needed > cluster.node.host_memory:
        yield Violation(
            field="offload",
            got=f"parameters on {offload.parameters}, optimizer on {offload.optimizer}",
            rule=f"{cluster.node.count} ranks keep {format_bytes(needed)} in a host "
            f"that has {format_bytes(cluster.node.host_memory)}",
            cure="shard over more ranks, or do not offload",
        )


def _disk_violations(plan: Plan) -> Iterator[Violation]:
    offload, options = plan.offload, plan.deepspeed
    if offload.optimizer == "disk" and plan.zero_stage != 3:
        yield Violation(
            field="offload.optimizer",
            got="disk",
            rule="DeepSpeed keeps an optimizer on a disk under ZeRO stage 3 only",
            cure="use zero_stage=3, or offload to cpu",
        )
    if offload.parameters != "disk":
        return
    defaults = DeepSpeedOptions()
    for name in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"):
        if getattr(options, name) not in (0, getattr(defaults, name)):
            yield Violation(
                field=f"deepspeed.{name}",
                got=getattr(options, name),
                rule="weights on a disk are gathered for one module at a time, because "
                "each of their shards needs one of a fixed number of buffers",
                cure="leave it at its default, or keep parameters on cpu",
            )
    whole = options.param_persistence_threshold * plan.number_format.weight_bytes
    if whole >= SMALLEST * plan.mesh.shard:
        yield Violation(
            field="deepspeed.param_persistence_threshold",
            got=options.param_persistence_threshold,
            rule="weights that every rank keeps whole must be small enough to stay in "
            f"memory: shards below {format_bytes(SMALLEST)}",
            cure="use the default",
        )
    if options.zero_hpz_partition_size > 1:
        yield Violation(
            field="deepspeed.zero_hpz_partition_size",
            got=options.zero_hpz_partition_size,
            rule="second shards of weights would stay on the device",
            cure="leave it at 1, or keep parameters on the device",
        )


def _host_bytes(plan: Plan, model: ModelSpec) -> float:
    """Return what a rank keeps in its machine's memory: shards, or buffers, nearly."""
    shards, width = plan.mesh.shard, plan.number_format.weight_bytes
    trained = model.trainable_elements / shards
    group = min(trained, plan.deepspeed.sub_group_size)
    rank = 0.0
    if plan.offload.parameters == "cpu":
        rank += width * model.elements / shards
    if plan.offload.parameters == "disk":
        rank += width * group * shards
    if plan.offload.optimizer == "disk":
        states = OPTIMIZERS.get(plan.optimizer).states
        rank += 4 * group * state_buffers(states)
    if plan.offload.optimizer == "cpu":
        # Masters and fp32 gradients, and the states.
        rank += 8 * trained + optimizer_state_bytes(plan, trained)
    return rank
