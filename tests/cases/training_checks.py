"""Cases of training right, on two real ranks; every function runs on both."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.errors import UsageError, WorkerError
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.running.session import Engine, prepare
from bigmodel.running.window import Window

WORLD = 2
SGD = partial(torch.optim.SGD, lr=1.0)
PAIR = partial(Plan, backend="ddp", mesh=Mesh(replicate=WORLD))
SHARDS = partial(Plan, backend="fsdp2", mesh=Mesh(shard=WORLD))


class Scale(nn.Module):
    """w * x, beginning at w = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Masked(Scale):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.w * x


class OwnLoss(Scale):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.w * x)[labels != -100].mean()


class Items:
    """Batches in their order; a list would be a dataset."""

    def __init__(self, items: list[Tensor]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.items)


class Counted(IterableDataset):
    """1, 2, ..., count; nobody knows how many."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(1.0, self.count + 1)


class Stream:
    """Counts, from a place of the rank's own, and keeps its state."""

    def __init__(self) -> None:
        self.next = 100 * dist.get_rank()

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.next += 1
            yield torch.tensor([float(self.next)])

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Drawn:
    """Every item draws a random number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(()) + index


def one_by_one(count: int) -> DataLoader:
    return DataLoader(Counted(count), batch_size=1)


def mean_output(output: Tensor, batch) -> Tensor:
    return output.mean()


def first_rank() -> bool:
    return dist.get_rank() == 0


def mine(values: Tensor) -> Tensor:
    half = len(values) // WORLD
    return values[dist.get_rank() * half :][:half]


def whole(engine: Engine, name: str) -> float:
    values: list = [engine.state_dict().get(name)]
    dist.broadcast_object_list(values)
    return float(values[0])


def gradient(engine: Engine, batch) -> float:
    """Return d loss / d w of one step of SGD with lr 1."""
    before = whole(engine, "w")
    engine.step(batch)
    return before - whole(engine, "w")


def folder_of(case: str) -> Path:
    """Return a folder that the ranks of this launch share."""
    return Path(gettempdir()) / f"{case}-{os.getppid()}"


def close(got, expected: float, within: float = 1e-6) -> None:
    if not abs(float(got) - expected) <= within:
        raise AssertionError(f"{float(got)} is not {expected}")


def same(got, expected) -> None:
    if got != expected:
        raise AssertionError(f"{got!r} is not {expected!r}")


def holds(text: str, part: str) -> None:
    if part not in text:
        raise AssertionError(f"{part!r} is not in {text!r}")


def error_of(kind: type[Exception], action) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def window_of(*parts: list[float]) -> Window:
    return Window(
        micro_batches=tuple(torch.tensor(part) for part in parts),
        real=(True,) * len(parts),
    )


def rate(engine: Engine) -> float:
    return engine._engine.optimizer.param_groups[0]["lr"]  # pyright: ignore


def ga_01_micro_batches_weigh_by_their_targets() -> None:
    """Means over [1, 1, 1, 1] and [5]: (4 * 1 + 5) / 5, not (1 + 5) / 2."""
    parts = [[1.0] * 4, [5.0]]
    for plan in (PAIR(), SHARDS()):
        with prepare(plan, Scale(), SGD, mean_output, targets=len) as engine:
            close(gradient(engine, window_of(parts[dist.get_rank()])), 1.8)
    with prepare(PAIR(accumulation=2), Scale(), SGD, mean_output) as engine:
        close(gradient(engine, window_of(*parts)), 1.8)


def ga_01_a_micro_batch_without_targets() -> None:
    """Its mean is 0 / 0, and so would be every gradient."""

    def masked(output: Tensor, batch) -> Tensor:
        return (output * batch["mask"]).sum() / batch["mask"].sum()

    def count(batch) -> Tensor:
        return batch["mask"].sum()

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for plan in (PAIR(micro_batch=2, accumulation=2), SHARDS(micro_batch=4)):
        with prepare(plan, Masked(), SGD, masked, targets=count) as engine:
            close(gradient(engine, {"x": x, "mask": torch.ones(4)}), 2.5)
            # Now the second rank has none at all.
            mask = torch.tensor([1.0, 1, 0, 0]) if first_rank() else torch.zeros(4)
            batch = {"x": x, "mask": mask}
            close(gradient(engine, batch), 1.5)
            close(engine.evaluate(batch), 1.5 * whole(engine, "w"))


def ga_03_unknown_means_are_said_once() -> None:
    batch = {"x": torch.tensor([1.0, 2.0]), "labels": torch.tensor([1, -100])}
    with (
        prepare(PAIR(micro_batch=2), OwnLoss(), SGD) as engine,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        engine.step(batch)
        engine.step(batch)
    same(sum("mean of means" in str(entry.message) for entry in said), 1)

    def count(batch) -> Tensor:
        return (batch["labels"] != -100).sum()

    with prepare(PAIR(micro_batch=4), OwnLoss(), SGD, targets=count) as engine:
        kept = 4 if first_rank() else 1
        labels = torch.tensor([1] * kept + [-100] * (4 - kept))
        x = torch.full((4,), 1.0 if first_rank() else 5.0)
        close(gradient(engine, {"x": x, "labels": labels}), 1.8)


def ga_05_logged_loss_does_not_depend_on_accumulation() -> None:
    def constant(output: Tensor, batch) -> Tensor:
        return output.sum() * 0 + 2.0

    for plan in (PAIR(), PAIR(accumulation=8), SHARDS(accumulation=8)):
        with prepare(plan, Scale(), SGD, constant) as engine:
            close(engine.step(torch.ones(plan.local_batch)).loss, 2.0)


def ga_16_schedulers_step_once_per_update() -> None:
    warm = partial(
        torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1, step / 4)
    )
    for plan in (PAIR(accumulation=4), SHARDS()):
        folder = folder_of(f"ga-16-{plan.backend}")
        batch = torch.ones(plan.local_batch)
        with prepare(plan, Scale(), SGD, mean_output, scheduler=warm) as engine:
            for _ in range(2):
                engine.step(batch)
            close(rate(engine), 0.5)
            engine.save(folder)
        with prepare(plan, Scale(), SGD, mean_output, scheduler=warm) as engine:
            engine.load(folder)
            close(rate(engine), 0.5)
            engine.step(batch)
            close(rate(engine), 0.75)


def cfg_06_micro_batches_of_any_size() -> None:
    """1, 3 and 2 samples: the sum over 6 samples, by 6."""
    parts = [torch.tensor([1.0]), torch.tensor([2.0, 3, 4]), torch.tensor([5.0, 6])]
    sampler = [[0], [1, 2, 3], [4, 5]]
    loader = DataLoader(list(torch.arange(1.0, 7)), batch_sampler=sampler)
    plans = PAIR(accumulation=3), SHARDS(accumulation=3)
    for plan, stream in ((p, s) for p in plans for s in (Items(parts), loader)):
        with prepare(plan, Scale(), SGD, mean_output) as engine:
            (window,) = engine.batches(stream, epochs=1)
            close(gradient(engine, window), 3.5)


def mp_01_overflow_is_skipped_everywhere_and_named() -> None:
    """16 skips bring the scale from 2**16 to 1; then the parameter is named."""

    class Overflows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.inf

    def loss(output: Tensor, batch) -> Tensor:
        # Reduced gradients are bad everywhere; those of FSDP2 in one shard only.
        return (output if first_rank() else Overflows.apply(output)).mean()

    for plan in (
        PAIR(precision="autocast-fp16"),
        PAIR(precision="fp16"),
        SHARDS(precision="fp16"),
    ):
        with prepare(plan, Scale(), SGD, loss, clip_norm=1.0) as engine:
            for _ in range(16):
                result = engine.step(torch.ones(1))
                same((result.skipped, result.grad_norm), (True, None))
            close(whole(engine, "w"), 1.0)
            same(engine._engine._updater.scale.factor, 1.0)  # pyright: ignore
            text = error_of(UsageError, lambda e=engine: e.step(torch.ones(1)))
            holds(text, "'w' on rank")
            holds(text, "bf16")
    with prepare(PAIR(precision="fp16"), Scale(), SGD, mean_output) as engine:
        # 2**16 is beyond float16, half of it is not.
        same(engine.step(torch.ones(1)).skipped, True)
        close(gradient(engine, torch.ones(1)), 1.0)


def mp_08_loss_in_fp32() -> None:
    seen: list[torch.dtype] = []
    torch.manual_seed(0)
    inputs, targets = torch.randn(4, 8), torch.randint(16, (4,))
    start = nn.Linear(8, 16).state_dict()

    def loss(output: Tensor, batch) -> Tensor:
        seen.append(output.dtype)
        return nn.functional.cross_entropy(output, batch[1])

    for precision in ("bf16", "fp16", "autocast"):
        for kind in (PAIR, SHARDS):
            model = nn.Linear(8, 16)
            model.load_state_dict(start)
            plan = kind(micro_batch=4, precision=precision)
            with prepare(plan, model, SGD, loss) as engine:
                result = engine.step((inputs, targets))
            same((seen.pop(), result.loss.dtype), (torch.float32, torch.float32))
            dtype = torch.float16 if precision == "fp16" else torch.bfloat16
            half = [start[name].to(dtype) for name in ("weight", "bias")]
            logits = nn.functional.linear(inputs.to(dtype), *half).float()
            expected = nn.functional.cross_entropy(logits, targets)
            close(result.loss, float(expected), 1e-6)


def pp_10_last_window_is_dropped_or_short() -> None:
    data = list(torch.arange(1.0, 11))
    plan = PAIR(accumulation=2)
    with prepare(plan, Scale(), SGD, mean_output) as engine:
        same(engine.steps_per_epoch(data), 2)
        same(sum(1 for b in engine.batches(data, epochs=1) if engine.step(b)), 2)
    with prepare(plan, Scale(), SGD, mean_output) as engine:
        same(engine.steps_per_epoch(data, last="short"), 3)
        batches = list(engine.batches(data, epochs=1, last="short", shuffle=False))
        same(len(batches), 3)
        # 9 and 10, both on rank 0; the other one takes part and weighs nothing.
        close(gradient(engine, batches[-1]), 9.5)
    # The case as it was told: 5 micro-batches, 2 a step, in stages.
    staged = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2),
        units=("0", "1"),
        stages=Stages(schedule="gpipe", cuts=(1,)),
        accumulation=2,
    )
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in layers.parameters():
        nn.init.ones_(parameter)
    points = [(torch.tensor([float(i)]), torch.zeros(1)) for i in range(1, 6)]

    def square(output: Tensor, batch) -> Tensor:
        return (output - batch[1]).square().mean()

    with prepare(staged, layers, SGD, square) as engine:
        same(engine.steps_per_epoch(points), 2)
        batches = list(engine.batches(points, epochs=1, last="short", shuffle=False))
        same(len(batches), engine.steps_per_epoch(points, last="short"))
        # The loss is 25 w1^2 w2^2: both gradients are 50.
        close(engine.step(batches[-1]).loss, 25.0)
        close(whole(engine, "0.weight"), -49.0)


def pp_13_ranks_agree_on_the_number_of_steps() -> None:
    stream = Items([torch.ones(1)] * (4 if first_rank() else 3))
    with prepare(PAIR(), Scale(), SGD, mean_output) as engine:
        same(sum(1 for w in engine.batches(stream, epochs=1) if engine.step(w)), 3)
        stream = stream if first_rank() else Items([])
        text = error_of(UsageError, lambda: next(engine.batches(stream, epochs=1)))
        holds(text, "data of rank 1 is empty")


def hang_06_uneven_streams_end_together() -> None:
    for plan in (PAIR(), SHARDS()):
        with prepare(plan, Scale(), SGD, mean_output) as engine:
            stream = one_by_one(2 if first_rank() else 4)
            same(sum(1 for w in engine.batches(stream, epochs=1) if engine.step(w)), 2)


def data_01_each_sample_counts_once() -> None:
    data = list(torch.arange(1.0, 6))
    own = [[1.0, 2.0, 3.0], [4.0]] if first_rank() else [[5.0]]
    for plan in (PAIR(), PAIR(micro_batch=2), SHARDS(micro_batch=3)):
        with prepare(plan, Scale(), SGD, mean_output) as engine:
            close(engine.evaluate_all(data), 3.0)
            parts = Items([torch.tensor(part) for part in own])
            close(engine.evaluate_all(parts), 3.0)


def data_05_going_on_draws_the_same_numbers() -> None:
    folder = folder_of("data-05")
    with prepare(PAIR(), Scale(), SGD, mean_output) as engine:
        iterator = engine.batches(Drawn())
        for _ in range(3):
            engine.step(next(iterator))
        engine.save(folder)
        expected = [engine.step(next(iterator)).loss.item() for _ in range(5)]
    with prepare(PAIR(), Scale(), SGD, mean_output, seed=7) as engine:
        engine.load(folder)
        same(engine.position.samples, 6)
        text = error_of(UsageError, lambda: engine.batches(Drawn(), seed=3))
        holds(text, "12 samples, shuffled with seed 3")
        iterator = engine.batches(Drawn())
        same([engine.step(next(iterator)).loss.item() for _ in range(5)], expected)


def data_08_every_item_once() -> None:
    """Streams of 5 and 7 items: 5 steps, or 7 with all 12 items."""
    count = 5 if first_rank() else 7
    with prepare(PAIR(), Scale(), SGD, mean_output) as engine:
        stream = one_by_one(count)
        same(sum(1 for w in engine.batches(stream, epochs=1) if engine.step(w)), 5)
    with prepare(SHARDS(), Scale(), SGD, mean_output) as engine:
        every = list(engine.batches(one_by_one(count), epochs=1, last="short"))
        items = torch.tensor([float(sum(len(w.batches) for w in every))])
        dist.all_reduce(items)
        same((len(every), items.item()), (7, 12.0))
        close(gradient(engine, every[-1]), 7.0)


def data_11_every_rank_keeps_its_own_place() -> None:
    folder = folder_of("data-11")
    for make in (Stream, partial(one_by_one, 9)):
        with prepare(PAIR(), Scale(), SGD, mean_output) as engine:
            iterator = engine.batches(make())
            for _ in range(2):
                engine.step(next(iterator))
            engine.save(folder)
        with prepare(PAIR(), Scale(), SGD, mean_output) as engine:
            engine.load(folder)
            window = next(engine.batches(make()))
            begin = 100 * dist.get_rank() if make is Stream else 0
            same(window.batches[0].item(), begin + 3.0)


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
