"""An `Accelerator` of accelerate that does what a plan says.

Imported only where it is used: accelerate is an extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, final

import torch
from accelerate import Accelerator, ParallelismConfig, init_empty_weights
from accelerate.state import PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
)

from bigmodel.backends.deepspeed.config import deepspeed_config
from bigmodel.backends.deepspeed.engine import import_deepspeed
from bigmodel.backends.recompute import apply_recompute
from bigmodel.errors import UsageError, Violation
from bigmodel.exports.accelerate_rules import MIXED_PRECISION
from bigmodel.observe.blocks import get_blocks
from bigmodel.plans import Plan
from bigmodel.running.model_argument import copy_from_first_rank

_HOOKS = {
    "none": DDPCommunicationHookType.NO,
    "fp16": DDPCommunicationHookType.FP16,
    "bf16": DDPCommunicationHookType.BF16,
    "powersgd": DDPCommunicationHookType.POWER_SGD,
}
_FSDP_ON_CPU = DistributedType.MULTI_GPU
"""What accelerate must take CPU processes for, so that it shards over them."""


@final
class PlannedAccelerator(Accelerator):
    """An Accelerator whose `prepare` also recomputes and wraps the plan's units.

    Args:
        plan: One that `accelerate_violations` allows.
        device: Of this process.
        clip_norm: Largest global norm, for DeepSpeed, which clips by itself.
        single_copy: Whether only rank 0 holds the weights before `prepare`; under
            DeepSpeed all ranks hold shards from the start.
        timeout: Seconds after which a silent rank is an error.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        *,
        clip_norm: float | None,
        single_copy: bool,
        timeout: float,
    ) -> None:
        self.plan = plan
        """The plan that is obeyed."""
        self._single_copy = single_copy
        on_cpu = device.type == "cpu"
        group = InitProcessGroupKwargs(
            backend="gloo" if on_cpu else "nccl", timeout=timedelta(seconds=timeout)
        )
        keywords: dict[str, Any] = {
            # DeepSpeed would be left out where CPUs are asked for.
            "cpu": on_cpu and plan.backend != "deepspeed",
            "mixed_precision": MIXED_PRECISION[plan.backend, plan.precision],
            # A plugin, because a number would yield to an environment variable.
            "gradient_accumulation_plugin": GradientAccumulationPlugin(
                num_steps=plan.accumulation,
                sync_each_batch=plan.backend == "fsdp2"
                and not plan.fsdp2.postpone_reduction,
            ),
            # The global batch is the plan's: a rank never takes part of another's.
            "dataloader_config": DataLoaderConfiguration(split_batches=False),
            "kwargs_handlers": [group],
        }
        if plan.backend == "ddp":
            keywords["kwargs_handlers"].append(_ddp(plan))
        elif plan.backend == "fsdp2":
            keywords["fsdp_plugin"] = _fsdp2(plan, single_copy, pin=not on_cpu)
            if plan.mesh.replicate > 1:
                keywords["parallelism_config"] = ParallelismConfig(
                    dp_replicate_size=plan.mesh.replicate,
                    dp_shard_size=plan.mesh.shard,
                )
            if on_cpu:
                _take_cpus_for_devices(group)
        else:
            import_deepspeed(device)
            keywords["deepspeed_plugin"] = DeepSpeedPlugin(
                hf_ds_config=deepspeed_config(plan, clip_norm),
                zero3_init_flag=single_copy,
            )
        super().__init__(**keywords)
        self._check_kind()

    def load_once(
        self,
        empty: Callable[[], nn.Module],
        whole: Callable[[], nn.Module] | None = None,
    ) -> nn.Module:
        """Return a model that has weights on rank 0 only; `prepare` hands them out.

            model = accelerator.load_once(
                lambda: AutoModelForCausalLM.from_config(config),
                lambda: AutoModelForCausalLM.from_pretrained(folder),
            )

        Args:
            empty: Makes the model; called on the other ranks, where its parameters
                take no memory.
            whole: Makes it with its weights; called on rank 0 only. None: `empty` does.

        Raises:
            UsageError: The Accelerator was made without `single_copy`, or is
                DeepSpeed's, where transformers shards while it loads.
        """
        if not self._single_copy or self.plan.backend != "fsdp2":
            raise UsageError(
                "load_once is for bigmodel.accelerator(plan, single_copy=True) and a "
                f"plan of backend 'fsdp2'; this plan is {self.plan.describe()}"
            )
        if self.process_index == 0:
            return (whole or empty)()
        # Buffers are small, and those outside of the state are not handed out.
        with init_empty_weights(include_buffers=False):
            return empty()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does, with the plan's units wrapped and recomputed.

        Raises:
            UsageError: Weights were to be loaded once and were not.
        """
        models = [value for value in args if isinstance(value, nn.Module)]
        for model in models:
            blocks = get_blocks(model, self.plan.units)
            if self._single_copy:
                _check_single_copy(model, self.process_index)
            elif self.plan.backend != "ddp" and self.plan.world > 1:
                # DDP does so itself.
                copy_from_first_rank(model, self.device)
            _hold_in_fp32(model)
            apply_recompute(blocks, self.plan)
            if self.is_fsdp2:
                names = sorted({type(block).__name__ for block in blocks.values()})
                plugin: Any = self.state.fsdp_plugin
                plugin.transformer_cls_names_to_wrap = names
        optimizers = [v for v in args if isinstance(v, torch.optim.Optimizer)]
        if not self.is_fsdp2 or len(models) != 1:
            return super().prepare(*args, device_placement=device_placement)
        named = _names(models[0], optimizers)
        prepared = super().prepare(*args, device_placement=device_placement)
        _rebind(models[0], optimizers, named)
        _check_sharded(models[0])
        return prepared

    def _check_kind(self) -> None:
        """Compare what accelerate set up with the plan, not what it was asked for."""
        expected = {
            "fsdp2": {DistributedType.FSDP},
            "deepspeed": {DistributedType.DEEPSPEED},
            "ddp": {
                DistributedType.MULTI_GPU,
                DistributedType.MULTI_CPU,
                DistributedType.NO,
            },
        }[self.plan.backend]
        if self.plan.world == 1:
            expected = expected | {DistributedType.NO}
        kind, world = self.distributed_type, self.num_processes
        if kind not in expected or world != self.plan.world:
            raise UsageError(
                Violation(
                    field="accelerate",
                    got=f"{kind.value} with {world} processes",
                    rule=f"the plan is {self.plan.describe()}; settings of accelerate "
                    "launch in the environment (ACCELERATE_USE_...) may say otherwise",
                    cure="launch with torchrun, or with the file that "
                    "bigmodel export --to accelerate writes for this plan",
                )
            )


def _ddp(plan: Plan) -> DistributedDataParallelKwargs:
    options = plan.ddp
    state = {}
    if options.hook == "powersgd":
        state = {
            "matrix_approximation_rank": options.powersgd_rank,
            "start_powerSGD_iter": options.powersgd_start,
        }
    megabytes: Any = options.bucket_megabytes
    return DistributedDataParallelKwargs(
        bucket_cap_mb=megabytes,
        find_unused_parameters=options.find_unused,
        gradient_as_bucket_view=options.gradient_views,
        static_graph=options.static_graph,
        comm_hook=_HOOKS[options.hook],
        comm_state_option=state,
    )


def _fsdp2(
    plan: Plan, single_copy: bool, *, pin: bool
) -> FullyShardedDataParallelPlugin:
    offload: Any = False
    if plan.offload.parameters == "cpu":
        # Told by True, accelerate pins, which is an error without a GPU.
        offload = CPUOffloadPolicy(pin_memory=pin)
    policy = MixedPrecisionPolicy()
    if plan.number_format.masters:
        # Told by name, accelerate would also reduce gradients in half precision.
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, plan.number_format.weights),
            reduce_dtype=getattr(torch, plan.fsdp2.reduce_dtype),
        )
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.fsdp2.reshard_after_forward,
        mixed_precision_policy=policy,
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=offload,
        state_dict_type="SHARDED_STATE_DICT",
        activation_checkpointing=False,
        cpu_ram_efficient_loading=single_copy,
    )


def _take_cpus_for_devices(group: InitProcessGroupKwargs) -> None:
    """Let accelerate shard over CPU processes.

    `AcceleratorState` looks at its FSDP plugin only where processes have devices, and
    leaves it out silently where they do not. FSDP2 itself works over gloo.
    """
    if PartialState._shared_state == {}:
        PartialState(cpu=True, **group.to_kwargs())
        PartialState._shared_state["distributed_type"] = _FSDP_ON_CPU


def _hold_in_fp32(model: nn.Module) -> None:
    """Make fp32 weights of those that were read in half precision, as `prepare` does.

    Plans count fp32 masters; without them small updates are lost.
    """
    for parameter in model.parameters():
        sharded = hasattr(parameter, "ds_id")
        if parameter.is_floating_point() and not sharded:
            parameter.data = parameter.data.float()


def _check_single_copy(model: nn.Module, rank: int) -> None:
    """Refuse a model that is whole on a rank that should hold nothing of it.

    transformers 5.24 takes `cpu_ram_efficient_loading` without an error, and then
    `from_pretrained` loads the whole model on every rank all the same.
    """
    whole = [
        name
        for name, value in model.named_parameters()
        # Those that DeepSpeed has already sharded have an id of its.
        if value.device.type != "meta" and not hasattr(value, "ds_id")
    ]
    if rank and whole:
        raise UsageError(
            Violation(
                field="single_copy",
                got=True,
                rule=f"rank {rank} holds {len(whole)} parameters with data, such as "
                f"{whole[0]!r}: the model was made whole on every rank",
                cure="make it with accelerator.load_once(...); under DeepSpeed, with "
                "transformers, after bigmodel.accelerator(...)",
            )
        )


def _names(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> list[list[list[str]]]:
    """Return the names of the parameters in every group of every optimizer."""
    names = {id(value): name for name, value in model.named_parameters()}
    return [
        [[names[id(value)] for value in group["params"]] for group in o.param_groups]
        for o in optimizers
    ]


def _rebind(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    named: list[list[list[str]]],
) -> None:
    """Give the optimizers the shards of their parameters, by name.

    accelerate finds them by address, and all empty parameters have the address 0: a
    rank that loaded no weights would step only one of them.
    """
    shards = dict(model.named_parameters())
    for optimizer, groups in zip(optimizers, named, strict=True):
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [shards[name] for name in names]


def _check_sharded(model: nn.Module) -> None:
    if not isinstance(model, FSDPModule):
        raise UsageError(
            "accelerate left the model unsharded; prepare the model together with its "
            "optimizer: model, optimizer = accelerator.prepare(model, optimizer)"
        )


def units_of(model: nn.Module) -> Iterator[str]:
    """Yield the names of the groups that are sharded on their own."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name
