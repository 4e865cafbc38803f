"""Faults of DeepSpeed's ZeRO, on two ranks."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from bigmodel.errors import UsageError
from bigmodel.plans import DeepSpeedOptions, Mesh, Plan
from bigmodel.running.session import Engine, prepare

STAGES = (1, 2, 3)


def zero(stage: int, *, sharded: bool = True, **fields) -> Plan:
    """Return a plan; under stage 3 every parameter is sharded unless told otherwise."""
    options = {"bucket_elements": 1000, **fields.pop("options", {})}
    if stage == 3 and sharded:
        options["param_persistence_threshold"] = 0
    return Plan(
        backend="deepspeed",
        mesh=Mesh(shard=2),
        zero_stage=stage,
        deepspeed=DeepSpeedOptions(**options),
        **fields,
    )


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def mean_of(output: Tensor, batch) -> Tensor:
    return output.float().mean()


def weights(engine: Engine) -> dict[str, Tensor]:
    """Return all weights, on every rank."""
    box = [engine.state_dict()]
    dist.broadcast_object_list(box, 0)
    return box[0]


class Scale(nn.Module):
    """One weight w, and w * x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Branches(nn.Module):
    """A trunk that all use, and a branch for samples that are above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 2)
        self.branch = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        return hidden + self.branch(x) if bool((x > 0).all()) else hidden


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches()


def unu_05_a_branch_that_one_rank_uses_gets_half_its_gradient():
    sign = 1.0 if dist.get_rank() == 0 else -1.0
    batch = torch.full((1, 2), sign)
    before = branches()
    for stage in (1, 2):
        plan = zero(stage, options={"find_unused": True})
        with prepare(plan, branches(), sgd, mean_of) as engine:
            engine.step(batch)
            after = weights(engine)
        # The mean over two outputs: 1/2 to each bias on rank 0, nothing on rank 1.
        moved = before.branch.bias.detach() - after["branch.bias"]
        assert torch.allclose(moved, torch.full((2,), 0.25)), (stage, moved)
        moved = before.trunk.bias.detach() - after["trunk.bias"]
        assert torch.allclose(moved, torch.full((2,), 0.5)), (stage, moved)


def unu_05_without_the_option_both_are_named_and_nothing_hangs():
    batch = torch.full((1, 2), 1.0 if dist.get_rank() == 0 else -1.0)
    for stage in (1, 2):
        named = pytest.raises(UsageError, match=r"branch\.weight.*find_unused=True")
        with prepare(zero(stage), branches(), sgd, mean_of) as engine, named:
            engine.step(batch)


def unu_06_an_unused_parameter_does_not_disturb_accumulation():
    batch = -torch.rand(4, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    for stage in STAGES:
        for fills in (False,) if stage == 3 else (False, True):
            plan = zero(stage, accumulation=4, options={"find_unused": fills})
            with prepare(plan, branches(), sgd, mean_of) as engine:
                engine.step(batch)
                engine.step(batch)
                got = weights(engine)
            lean = nn.Sequential(copy.deepcopy(branches().trunk))
            with prepare(zero(stage, accumulation=4), lean, sgd, mean_of) as engine:
                engine.step(batch)
                engine.step(batch)
                expected = weights(engine)
            for name in ("weight", "bias"):
                close = torch.allclose(got[f"trunk.{name}"], expected[f"0.{name}"])
                assert close, (stage, fills, name)
            assert torch.equal(got["branch.bias"], branches().branch.bias), stage


def _gpt2(vocabulary: int = 16) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_positions=8, n_embd=8, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _tokens(samples: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(6, (samples, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _adam(params):
    return torch.optim.AdamW(params, lr=1e-2)


def unu_10_unu_11_adapters_are_saved_with_true_shapes_and_values():
    from deepspeed.runtime.zero import GatheredParameters
    from peft import (
        LoraConfig,
        get_peft_model,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )

    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(_gpt2(), config)
    with prepare(zero(3, micro_batch=2), model, _adam) as engine:
        for _ in range(3):
            engine.step(_tokens())
        state = engine.state_dict()
        live = {}
        for name, value in model.named_parameters():
            if "lora_" in name:
                with GatheredParameters([value]):
                    live[name] = value.detach().clone()
    if dist.get_rank():
        return
    saved = get_peft_model_state_dict(model, state_dict=state)
    assert len(saved) == len(live) == 4
    fresh = get_peft_model(_gpt2(), config)
    set_peft_model_state_dict(fresh, saved)
    for name, value in fresh.named_parameters():
        if "lora_" in name:
            assert value.shape == live[name].shape, name
            assert torch.equal(value, live[name]), name
            assert value.abs().max() > 0, name


def ga_06_a_loop_of_ones_own_accumulates_without_no_sync():
    for stage in STAGES:
        found = []
        for accumulation in (1, 4):
            plan = zero(stage, micro_batch=4 // accumulation, accumulation=accumulation)
            batch = _tokens(4)
            with prepare(plan, _gpt2(), _adam) as engine:
                for part in range(accumulation):
                    rows = slice(part * plan.micro_batch, (part + 1) * plan.micro_batch)
                    output = engine.forward(**{k: v[rows] for k, v in batch.items()})
                    engine.backward(output.loss)
                engine.step()
                found.append(weights(engine))
        for name, value in found[0].items():
            assert torch.allclose(value, found[1][name], atol=1e-5), (stage, name)


def mp_01_sixteen_skips_then_a_report_that_names_the_parameter():
    """Only rank 1 overflows; both skip, nothing moves, and both say which it was."""
    batch = torch.ones(1, 2)
    huge = 1e30 if dist.get_rank() == 1 else 1.0

    def loss(output: Tensor, _) -> Tensor:
        return output.float().mean() * huge

    for stage in STAGES:
        model = nn.Sequential(nn.Linear(2, 2))
        before = {k: v.detach().half().float() for k, v in model.state_dict().items()}
        with prepare(zero(stage, precision="fp16"), model, sgd, loss) as engine:
            for step in range(16):
                result = engine.step(batch)
                assert result.skipped, (stage, step)
                assert result.grad_norm is None
            if dist.get_rank() == 0:
                for name, value in engine.state_dict().items():
                    assert torch.equal(value, before[name]), (stage, name)
            else:
                engine.state_dict()
            with pytest.raises(UsageError, match=r"'0\.weight'.*bf16"):
                engine.step(batch)


def mp_03_ones_add_up_in_fp32():
    """512 of them, for shares that are powers of two; bfloat16 ends at 256."""
    count = 512
    x = torch.full((count, 1), float(count))
    for stage, kind, expected in (
        (2, None, count),
        (3, None, count),
        (2, "weights", 256),
    ):
        options = {"grad_accum_dtype": kind}
        plan = zero(stage, precision="bf16", accumulation=count, options=options)
        with prepare(plan, Scale(), sgd, mean_of) as engine:
            engine.step(x)
            moved = -float(weights(engine)["w"])
        assert moved == expected, (stage, kind, moved)


def mp_05_a_large_gradient_is_reduced_in_bfloat16_not_float16():
    for stage in STAGES:
        plan = zero(stage, precision="bf16")
        with prepare(plan, Scale(), sgd, mean_of) as engine:
            engine.step(torch.full((1, 1), 70_000.0))
            moved = -float(weights(engine)["w"])
        assert moved == 70_144.0, (stage, moved)


def zero_01_a_vocabulary_is_resized_before_the_model_is_sharded():
    model = _gpt2(6)
    old = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(8, mean_resizing=False)
    with prepare(zero(3, micro_batch=2), model, _adam) as engine:
        found = weights(engine)["transformer.wte.weight"]
        assert found.shape == (8, 8)
        # Rank 0's rows reach all.
        assert torch.equal(found[:6], old)
        engine.step(_tokens())


def zero_03_second_shards_change_nothing_and_are_not_stale_after_loading():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    losses: dict[int, list[float]] = {}
    # The last one again without: DeepSpeed's group of second shards is global.
    for turn, size in enumerate((1, 2, 1)):
        plan = zero(3, micro_batch=2, options={"zero_hpz_partition_size": size})
        path = Path(folder[0]) / str(turn)
        with prepare(plan, _gpt2(), _adam) as engine:
            found = [float(engine.step(_tokens()).loss) for _ in range(20)]
            engine.save(path)
            expected = float(engine.evaluate(_tokens()))
        with prepare(plan, _gpt2(), _adam) as engine:
            engine.step(_tokens())
            engine.load(path)
            found += [float(engine.evaluate(_tokens()))]
            assert found[-1] == expected, size
        losses[turn] = found
    assert losses[0] == losses[1] == losses[2]


def zero_05_saving_before_the_first_step_changes_nothing():
    batch = _same(_tokens())
    for stage in STAGES:
        found = []
        for saves in (False, True):
            with prepare(zero(stage, micro_batch=2), _gpt2(), _adam) as engine:
                if saves:
                    folder = [tempfile.mkdtemp()]
                    dist.broadcast_object_list(folder, 0)
                    engine.save(folder[0])
                engine.step(batch)
                found.append(float(engine.evaluate(batch)))
        assert found[0] == found[1], (stage, found)


def linear_1_is_torchs_own_again_when_the_last_engine_has_gone():
    own = functional.linear
    first = prepare(zero(3), lambda: nn.Linear(4, 4), sgd, mean_of)
    second = prepare(zero(3), lambda: nn.Linear(4, 4), sgd, mean_of)
    assert functional.linear is not own
    first.close()
    assert functional.linear is not own
    second.close()
    assert functional.linear is own


def zero_08_weights_alone_are_loaded_in_one_process_without_an_optimizer():
    batch = _tokens()
    with prepare(zero(3, micro_batch=2), _gpt2(), _adam) as engine:
        engine.step(batch)
        state = engine.state_dict()
        loss = engine.evaluate({k: v[:1] for k, v in _same(batch).items()})
    if dist.get_rank() == 0:
        alone = _gpt2()
        alone.load_state_dict(state)
        alone.eval()
        with torch.no_grad():
            expected = alone(**{k: v[:1] for k, v in batch.items()}).loss
        assert abs(float(loss) - float(expected)) < 1e-6


def _same(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return rank 0's batch on both ranks."""
    box = [batch]
    dist.broadcast_object_list(box, 0)
    return box[0]
