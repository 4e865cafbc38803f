"""Losses, their weights and number formats, on two real ranks."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bigmodel.errors import UsageError
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.running.session import Engine, prepare
from tests.cases.subjects import (
    PAIR,
    SGD,
    SHARDS,
    Items,
    Scale,
    close,
    error_of,
    first_rank,
    folder_of,
    gradient,
    holds,
    mean_output,
    same,
    whole,
    window_of,
)


class Masked(Scale):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.w * x


class OwnLoss(Scale):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.w * x)[labels != -100].mean()


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


def ga_01_a_loop_of_ones_own_weighs_too() -> None:
    """The window of GA-01, by forward and backward."""
    parts = [torch.ones(4), torch.tensor([5.0])]
    for plan in (PAIR(accumulation=2), SHARDS(accumulation=2)):
        with prepare(plan, Scale(), SGD, mean_output, targets=len) as engine:
            shares = engine.shares(parts)
            for part, share in zip(parts, shares, strict=True):
                engine.backward(engine.forward(part).mean(), share)
            result = engine.step()
            close(result.loss, 1.8)
            close(whole(engine, "w"), 1.0 - 1.8)


def ga_01_no_targets_before_any() -> None:
    """Nothing can be run instead: said, where the loss is no number."""

    def masked(output: Tensor, batch) -> Tensor:
        return (output * batch["mask"]).sum() / batch["mask"].sum()

    def safe(output: Tensor, batch) -> Tensor:
        return (output * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)

    def count(batch) -> Tensor:
        return batch["mask"].sum()

    # The same on both ranks, or the other one would wait for this one's gradient.
    batch = {"x": torch.ones(1), "mask": torch.zeros(1)}
    with prepare(PAIR(), Masked(), SGD, masked, targets=count) as engine:
        text = error_of(UsageError, lambda: engine.step(batch))
        holds(text, "without any target is nan")
    with prepare(PAIR(), Masked(), SGD, safe, targets=count) as engine:
        close(gradient(engine, batch), 0.0)


def mp_01_stages_skip_together() -> None:
    """A gradient overflows on the first stage alone: the last one skips too."""

    class Fourfold(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 4

    class Steep(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return Fourfold.apply(super().forward(x))

    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2),
        units=("0", "1"),
        stages=Stages(schedule="gpipe", cuts=(1,)),
        precision="fp16",
    )

    def loss(output: Tensor, batch) -> Tensor:
        return output.mean()

    with prepare(plan, nn.Sequential(Steep(), Scale()), SGD, loss) as engine:
        skips = 0
        batch = (torch.ones(1, 1), torch.zeros(1))
        while engine.step(batch).skipped:
            skips += 1
            close(whole(engine, "0.w"), 1.0)
            close(whole(engine, "1.w"), 1.0)
        # 2**16 is beyond float16 on both; 4 * 2**15 and 4 * 2**14 on the first alone.
        same(skips, 3)
        close(whole(engine, "0.w"), -3.0)
        close(whole(engine, "1.w"), 0.0)


def mp_08_outputs_of_every_kind() -> None:
    @dataclass
    class Answer:
        scores: Tensor
        note: str = "kept"

    class Kinds(nn.Linear):
        kind = "dataclass"

        def forward(self, x: Tensor):
            scores = super().forward(x)
            if self.kind == "dataclass":
                return Answer(scores)
            return {"scores": scores} if self.kind == "dict" else (scores, "kept")

    def scores(output) -> Tensor:
        if isinstance(output, Answer):
            same(output.note, "kept")
            return output.scores
        return output["scores"] if isinstance(output, dict) else output[0]

    def loss(output, batch) -> Tensor:
        same(scores(output).dtype, torch.float32)
        return scores(output).mean()

    for kind in ("dataclass", "dict", "tuple"):
        model = Kinds(2, 2)
        model.kind = kind
        with prepare(PAIR(precision="bf16"), model, SGD, loss) as engine:
            same(engine.step(torch.ones(1, 2)).loss.dtype, torch.float32)
