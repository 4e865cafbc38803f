"""What ranks do together beside a step, and what they train, on two real ranks."""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.errors import UsageError, WorkerError
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.running.decay_groups import decay_groups
from bigmodel.running.session import prepare
from tests.cases.subjects import (
    PAIR,
    SGD,
    SHARDS,
    WORLD,
    Scale,
    error_of,
    first_rank,
    folder_of,
    holds,
    mean_output,
    mine,
    same,
)


def hang_03_saving_on_one_rank_only() -> None:
    folder = folder_of("hang-03")
    engine = prepare(PAIR(), Scale(), SGD, mean_output)
    engine.step(torch.ones(1))
    begin = time.monotonic()
    if first_rank():
        text = error_of(WorkerError, lambda: engine.save(folder))
        holds(text, "rank 1 did not enter save")
        same(folder.exists(), False)
    engine.close()
    same(time.monotonic() - begin < 10, True)
    dist.barrier()


def hang_08_long_work_of_the_first_rank() -> None:
    begin = time.monotonic()
    with prepare(PAIR(), Scale(), SGD, mean_output) as engine:
        engine.rank0_first(lambda: time.sleep(2 if first_rank() else 0))
        same(time.monotonic() - begin >= 2, True)
        if first_rank():
            engine.rank0_first(lambda: time.sleep(2))
        else:
            text = error_of(
                WorkerError, lambda: engine.rank0_first(lambda: None, timeout=0.3)
            )
            holds(text, "waited 0.3 s for rank 0")
        dist.barrier()


def ga_06_a_loop_of_ones_own() -> None:
    """forward, backward and step are engine.step, under every plan without stages."""
    data = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    adam = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5)

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(output: Tensor, batch) -> Tensor:
        return output.square().mean()

    zero = partial(Plan, backend="deepspeed", mesh=Mesh(shard=WORLD), zero_stage=2)
    for kind in (PAIR, SHARDS, zero):
        plan = kind(micro_batch=2, accumulation=2)
        results = []
        for own in (False, True):
            with prepare(plan, fresh(), adam, loss, clip_norm=0.1) as engine:
                for step in data:
                    if not own:
                        engine.step(mine(step))
                        continue
                    for micro in mine(step).split(2):
                        engine.backward(loss(engine.forward(micro), micro))
                    engine.step()
                if own:
                    text = error_of(UsageError, engine.step)
                    holds(text, "after 0 of the plan's 2")
                results.append(engine.state_dict())
        for name, value in results[0].items():
            torch.testing.assert_close(value, results[1][name], rtol=0, atol=1e-7)


def unu_10_adapters_have_their_true_shapes() -> None:
    """LoRA by peft: only adapters have optimizer states, and what is saved is live."""
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=32,
            n_positions=8,
            n_embd=16,
            n_layer=2,
            n_head=2,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        options = peft.LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0
        )
        return peft.get_peft_model(GPT2LMHeadModel(config), options)

    units = tuple(f"base_model.model.transformer.h.{i}" for i in range(2))
    ids = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
    adam = partial(torch.optim.AdamW, lr=1e-2)
    for kind in (PAIR, SHARDS):
        plan = kind(micro_batch=2, units=units, recompute=("full",) * 2)
        with prepare(plan, make(), adam, clip_norm=1.0) as engine:
            for _ in range(3):
                engine.step({"input_ids": mine(ids), "labels": mine(ids)})
            state = engine.state_dict()
            held = engine._engine.optimizer.param_groups  # pyright: ignore
            same(sum(len(group["params"]) for group in held), 4)
        if not first_rank():
            continue
        folder = folder_of(f"unu-10-{plan.backend}")
        saved = make()
        shapes = {name: value.shape for name, value in saved.state_dict().items()}
        saved.save_pretrained(folder, state_dict=state)
        loaded = make()
        loaded.load_adapter(folder, adapter_name="default")
        live = loaded.state_dict()
        adapters = [name for name in state if "lora_" in name]
        same(len(adapters), 4)
        for name in adapters:
            same(state[name].shape, shapes[name])
            same(torch.equal(live[name], state[name]), True)
            same(bool(state[name].abs().max() > 0), True)


def ac_06_batch_statistics_count_once() -> None:
    points = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    states = []
    for recompute in ((), ("full",) * 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        plan = PAIR(micro_batch=2, units=("0", "1", "2"), recompute=recompute)
        with prepare(plan, model, SGD, mean_output) as engine:
            engine.step(mine(points))
            states.append(engine.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name])
    if first_rank():
        same(int(states[1]["1.num_batches_tracked"]), 1)


def hang_01_sequences_of_unequal_lengths() -> None:
    """3 and 7 tokens: all run 7 forwards where weights are sharded."""
    calls = 0

    class Next(Scale):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x) + 1

    wanted = 3 if first_rank() else 7
    for plan, forwards in ((SHARDS(), 7), (PAIR(), wanted)):
        with prepare(plan, Next(), SGD, mean_output) as engine:
            calls, tokens = 0, [torch.zeros(1)]
            with engine.inference() as model:
                for _ in range(wanted):
                    tokens.append(model(tokens[-1]))
            same((calls, len(tokens) - 1), (forwards, wanted))
            same(float(tokens[-1]), float(wanted))
            same(engine.step(torch.ones(1)).skipped, False)


def ga_06_norms_and_biases_do_not_decay() -> None:
    """Without a gradient AdamW only decays: w * (1 - lr * decay), matrices alone."""

    def nothing(output: Tensor, batch) -> Tensor:
        return output.mean() * 0

    zero = partial(Plan, backend="deepspeed", mesh=Mesh(shard=WORLD), zero_stage=2)
    for kind in (PAIR, SHARDS, zero):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        groups = decay_groups(model, 0.5)
        same([len(group["params"]) for group in groups], [1, 3])
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        with prepare(kind(), model, optimizer, nothing) as engine:
            engine.step(torch.ones(1, 4))
            for name, value in engine.state_dict().items():
                expected = 0.95 if name == "0.weight" else 1.0
                torch.testing.assert_close(value, torch.full_like(value, expected))


def ac_06_stages_drop_different_elements() -> None:
    """Two stages with a dropout each: no element is zero for one reason only."""
    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2),
        units=("0", "1"),
        stages=Stages(schedule="gpipe", cuts=(1,)),
    )
    kept: list[Tensor] = []

    class Drop(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            mask = nn.functional.dropout(torch.ones(1, 1000)) > 0
            kept.append(mask)
            return super().forward(x)

    model = nn.Sequential(Drop(1, 1), Drop(1, 1))
    with prepare(plan, model, SGD, lambda output, batch: output.mean()) as engine:
        kept.clear()
        engine.step((torch.ones(1, 1), torch.zeros(1)))
    masks: list = [None, None]
    dist.all_gather_object(masks, kept[-1])
    same(torch.equal(*masks), False)
    # Independent masks share about a quarter of the elements.
    same(200 < int((masks[0] & masks[1]).sum()) < 300, True)
