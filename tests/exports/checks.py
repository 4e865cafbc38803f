"""What each rank of one launch checks; every check is collective."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from transformers import LlamaForCausalLM

import bigmodel
from bigmodel.errors import UsageError, WorldError
from bigmodel.plans import DdpOptions, Fsdp2Options, Mesh, Offload
from tests.exports import training
from tests.exports.training import DDP, FSDP2, ZERO, largest_difference, recomputed

EXACT = 1e-5
HALF = 3e-2
CHECKS: dict[str, Callable[[], str | None]] = {}


def check(function: Callable[[], str | None]) -> Callable[[], str | None]:
    CHECKS[function.__name__] = function
    return function


def trained(plan, clip_norm=None, **keywords) -> list[float]:
    with training.fresh_accelerate():
        accelerator = bigmodel.accelerator(plan, clip_norm=clip_norm, **keywords)
        return training.by_accelerate(accelerator, training.make_model(), clip_norm)


def _same(plan, tolerance: float, **keywords) -> str:
    got = trained(plan, **keywords)
    expected = training.alone(keywords.get("clip_norm"))
    apart = largest_difference(got, expected)
    assert apart < tolerance, (got, expected)
    return f"{apart:.1e}"


@check
def ddp_is_one_process() -> str:
    return _same(DDP, EXACT)


@check
def ddp_with_recompute_and_clipping_is_one_process() -> str:
    return _same(recomputed(DDP), EXACT, clip_norm=0.5)


@check
def ddp_autocast_is_the_engine() -> str:
    plan = replace(DDP, precision="autocast")
    apart = largest_difference(trained(plan), training.by_engine(plan))
    assert apart < HALF
    return f"{apart:.1e}"


@check
def fsdp2_is_one_process() -> str:
    return _same(FSDP2, EXACT)


@check
def fsdp2_with_recompute_and_clipping_is_one_process() -> str:
    return _same(recomputed(FSDP2), EXACT, clip_norm=0.5)


@check
def fsdp2_offloaded_is_one_process() -> str:
    plan = replace(FSDP2, offload=Offload(parameters="cpu", optimizer="cpu"))
    return _same(plan, EXACT)


@check
def fsdp2_bf16_is_the_engine() -> str:
    plan = replace(FSDP2, precision="bf16")
    apart = largest_difference(trained(plan), training.by_engine(plan))
    assert apart < EXACT
    return f"{apart:.1e}"


@check
def fsdp2_options_are_the_engines() -> str:
    options = Fsdp2Options(
        reshard_after_forward=False, reduce_dtype="bfloat16", postpone_reduction=True
    )
    plan = replace(FSDP2, precision="bf16", fsdp2=options)
    apart = largest_difference(trained(plan), training.by_engine(plan))
    assert apart < EXACT
    return f"{apart:.1e}"


@check
def zero_1_with_clipping_is_one_process() -> str:
    return _same(ZERO, EXACT, clip_norm=0.5)


@check
def zero_2_bf16_is_the_engine() -> str:
    plan = replace(ZERO, zero_stage=2, precision="bf16")
    apart = largest_difference(trained(plan), training.by_engine(plan))
    assert apart < EXACT
    return f"{apart:.1e}"


@check
def zero_3_with_recompute_is_one_process() -> str:
    return _same(recomputed(replace(ZERO, zero_stage=3)), EXACT)


@check
def units_are_the_groups_of_shards() -> None:
    from bigmodel.exports.planned_accelerator import units_of

    with training.fresh_accelerate():
        accelerator = bigmodel.accelerator(FSDP2)
        model = training.make_model()
        accelerator.prepare(model, training.optimizer_of(model.parameters()))
        assert set(training.UNITS) <= set(units_of(model))


@check
def cfg_08_single_copy_without_effect_is_an_error() -> None:
    """The setting is taken, and transformers loads the model on every rank."""
    with training.fresh_accelerate():
        bigmodel.accelerator(FSDP2, single_copy=True)
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
        accelerator = bigmodel.accelerator(FSDP2, single_copy=True)
        model = LlamaForCausalLM.from_pretrained(os.environ["EXPORTS_FOLDER"])
        if not accelerator.is_main_process:
            with pytest.raises(UsageError, match="made whole on every rank"):
                accelerator.prepare(model, training.optimizer_of(model.parameters()))


@check
def cfg_08_only_rank_0_holds_weights() -> str:
    with training.fresh_accelerate():
        accelerator = bigmodel.accelerator(FSDP2, single_copy=True)
        model = accelerator.load_once(
            lambda: LlamaForCausalLM(training.CONFIG),
            lambda: LlamaForCausalLM.from_pretrained(os.environ["EXPORTS_FOLDER"]),
        )
        kinds = {value.device.type for value in model.parameters()}
        assert kinds == ({"meta"} if dist.get_rank() else {"cpu"})
        losses = training.by_accelerate(accelerator, model)
        apart = largest_difference(losses, training.alone())
        assert apart < EXACT, losses
        return f"{apart:.1e}"


@check
def cfg_08_zero_3_shards_while_transformers_loads() -> str:
    with training.fresh_accelerate():
        plan = replace(ZERO, zero_stage=3)
        accelerator = bigmodel.accelerator(plan, single_copy=True)
        model = LlamaForCausalLM.from_pretrained(os.environ["EXPORTS_FOLDER"])
        assert all(hasattr(value, "ds_id") for value in model.parameters())
        losses = training.by_accelerate(accelerator, model)
        apart = largest_difference(losses, training.alone())
        assert apart < EXACT, losses
        return f"{apart:.1e}"


@check
def ranks_that_begin_apart_get_the_weights_of_rank_0() -> None:
    expected = training.alone()
    for plan in (DDP, FSDP2, replace(ZERO, zero_stage=3)):
        with training.fresh_accelerate():
            accelerator = bigmodel.accelerator(plan)
            torch.manual_seed(dist.get_rank())
            model = LlamaForCausalLM(training.CONFIG)
            losses = training.by_accelerate(accelerator, model)
            assert largest_difference(losses, expected) < EXACT, plan.describe()


@check
def options_reach_the_wrapper() -> None:
    options = DdpOptions(bucket_megabytes=3.0, hook="fp16", find_unused=True)
    with training.fresh_accelerate():
        accelerator = bigmodel.accelerator(replace(DDP, ddp=options))
        wrapped = accelerator.prepare(training.make_model())
        assert wrapped.gradient_as_bucket_view
        assert wrapped.find_unused_parameters
        assert wrapped.bucket_bytes_cap == 3 * 2**20
        assert wrapped._comm_hooks[0][0] is default_hooks.fp16_compress_hook


@check
def another_kind_in_the_process_is_refused() -> None:
    with training.fresh_accelerate():
        bigmodel.accelerator(DDP)
        with pytest.raises(UsageError, match="MULTI_CPU with 2 processes"):
            bigmodel.accelerator(FSDP2)


@check
def launch_10_the_plan_wins_over_the_environment() -> None:
    """By itself accelerate lets ACCELERATE_GRADIENT_ACCUMULATION_STEPS win."""
    with training.fresh_accelerate():
        os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "7"
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        accelerator = bigmodel.accelerator(DDP)
        assert accelerator.mixed_precision == "no"
        assert accelerator.gradient_accumulation_steps == DDP.accumulation


@check
def another_world_is_refused() -> None:
    with training.fresh_accelerate(), pytest.raises(WorldError, match="start 3"):
        bigmodel.accelerator(replace(DDP, mesh=Mesh(replicate=3)))


def _trainer(plan, kind: str, tolerance: float, clip_norm: float, **changes) -> str:
    keywords = bigmodel.trainer_arguments(
        plan, clip_norm=clip_norm, device=None if kind != "FSDP" else "cuda"
    )
    with training.fresh_accelerate():
        folder = os.environ["EXPORTS_FOLDER"]
        got, losses = training.by_trainer(keywords | changes, folder)
    assert got == kind
    apart = largest_difference(losses, training.alone(clip_norm, decay=0.0))
    assert apart < tolerance, losses
    return f"{apart:.1e}"


@check
def trainer_under_ddp_is_one_process() -> str:
    return _trainer(DDP, "MULTI_CPU", EXACT, 0.5)


@check
def trainer_under_ddp_with_autocast_and_recompute() -> str:
    plan = recomputed(replace(DDP, precision="autocast"))
    return _trainer(plan, "MULTI_CPU", HALF, 0.5)


@check
def trainer_under_fsdp2_is_one_process() -> str:
    on_cpu = {"use_cpu": True, "ddp_backend": "gloo"}
    return _trainer(recomputed(FSDP2), "FSDP", EXACT, 0.5, **on_cpu)


@check
def trainer_under_fsdp2_bf16() -> str:
    on_cpu = {"use_cpu": True, "ddp_backend": "gloo"}
    return _trainer(replace(FSDP2, precision="bf16"), "FSDP", HALF, 0.5, **on_cpu)


@check
def trainer_under_zero_1_is_one_process() -> str:
    return _trainer(ZERO, "DEEPSPEED", EXACT, 0.5)


@check
def trainer_under_zero_2_bf16() -> str:
    plan = replace(ZERO, zero_stage=2, precision="bf16")
    return _trainer(plan, "DEEPSPEED", HALF, 0.5)


@check
def trainer_under_zero_3_is_one_process() -> str:
    plan = recomputed(replace(ZERO, zero_stage=3))
    return _trainer(plan, "DEEPSPEED", EXACT, 0.5)


@check
def half_precision_weights_get_fp32_masters() -> None:
    """As transformers loads most checkpoints: 1 + 1e-3 is lost in bfloat16."""
    for plan in (DDP, FSDP2, replace(ZERO, zero_stage=2, precision="bf16")):
        with training.fresh_accelerate():
            accelerator = bigmodel.accelerator(replace(plan, accumulation=1))
            model = training.make_model().to(torch.bfloat16)
            optimizer = training.optimizer_of(model.parameters())
            model, optimizer = accelerator.prepare(model, optimizer)
            states = optimizer.param_groups
            kinds = {value.dtype for group in states for value in group["params"]}
            assert kinds == {torch.float32}, (plan.describe(), kinds)


def prepare_folder(folder: str) -> None:
    """Write the checkpoint that `from_pretrained` reads, on rank 0."""
    os.environ["EXPORTS_FOLDER"] = folder
    if dist.get_rank() == 0:
        training.make_model().save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(0)
