"""What is checked with two ranks; every function runs on both.

All run in one launch. A check returns nothing when all is well and raises otherwise.
Those named by a case of `cases.jsonl` begin with its id.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bigmodel.backends.ddp.shadow import deal
from bigmodel.errors import UsageError
from bigmodel.models import Param
from bigmodel.plans import DdpOptions, Mesh, Plan
from bigmodel.running.session import Engine, prepare

WORLD = 2
SGD = partial(torch.optim.SGD, lr=1.0)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-6, weight_decay=0.1)


class Branches(nn.Module):
    """Two layers, of which a batch uses the second where its last element says so."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.never_called = nn.Linear(4, 4)

    def forward(self, inputs: Tensor, both: Tensor) -> Tensor:
        outputs = self.used(inputs)
        return self.never_called(outputs) if both.any() else outputs


class Shared(nn.Module):
    """Two blocks that hold the same layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)
        )
        self.rare = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 4))


def squared(output: Tensor, batch) -> Tensor:
    return output.square().mean()


def plan_of(accumulation: int = 1, **changes) -> Plan:
    return Plan(
        backend="ddp",
        mesh=Mesh(replicate=WORLD),
        micro_batch=2,
        accumulation=accumulation,
        **changes,
    )


def points(samples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator)


def mine(batch: Tensor) -> Tensor:
    return batch.chunk(WORLD)[dist.get_rank()]


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """Return this rank's own weights, not those that rank 0 would save."""
    module: nn.Module = engine._engine.module  # pyright: ignore
    return {key: value.detach().clone() for key, value in module.named_parameters()}


def unu_01_an_unused_parameter_is_named() -> None:
    for used_before in (False, True):
        with prepare(plan_of(), make(Branches), ADAMW, squared) as engine:
            flags = [torch.ones(2)] * used_before + [torch.zeros(2)]
            batches = [(mine(points(4)), flag, flag) for flag in flags]
            for batch in batches[:-1]:
                engine.step(batch)
            text = refusal(lambda e=engine, b=batches[-1]: e.step(b))
        contains(text, "never_called.weight, never_called.bias (of never_called)")
        contains(text, "had been used before" if used_before else "never used so far")
        contains(text, "requires_grad_(False)")
        contains(text, "find_unused=True")


def unu_15_a_globally_unused_parameter_stays() -> None:
    for changes in ({}, {"zero_stage": 1}, {"precision": "bf16"}, {"accumulation": 2}):
        plan = plan_of(ddp=DdpOptions(find_unused=True), **changes)
        with prepare(plan, make(Branches), ADAMW, squared) as engine:
            before = weights_of(engine)
            samples = plan.global_batch
            flag = torch.zeros(plan.local_batch)
            engine.step((mine(points(samples)), flag, flag))
            after = weights_of(engine)
            module = engine._engine.module  # pyright: ignore
            same([p.grad for p in module.parameters()], [None] * 4)
        moved = {key for key in before if not torch.equal(before[key], after[key])}
        same(moved, {"used.weight", "used.bias"})


def used_on_one_rank_only() -> None:
    """The other rank's gradient counts as zero, as in one process."""
    alone = make(Branches)
    optimizer = ADAMW(alone.parameters())
    plan = plan_of(ddp=DdpOptions(find_unused=True))
    with prepare(plan, make(Branches), ADAMW, squared) as engine:
        for step in range(3):
            halves = points(4, step).chunk(WORLD)
            flags = [torch.zeros(2), torch.ones(2)]
            for half, flag in zip(halves, flags, strict=True):
                (squared(alone(half, flag), None) / WORLD).backward()
            optimizer.step()
            optimizer.zero_grad()
            rank = dist.get_rank()
            engine.step((halves[rank], flags[rank], flags[rank]))
        for key, value in weights_of(engine).items():
            close(value, alone.get_parameter(key))


def unu_03_recompute_with_unused_parameters() -> None:
    """A layer in two recomputed blocks is ready once, though some are unused."""
    alone = make(Shared)
    optimizer = ADAMW(alone.parameters())
    plan = plan_of(
        accumulation=2,
        units=("blocks.0", "blocks.1"),
        recompute=("full", "full"),
        ddp=DdpOptions(find_unused=True),
    )
    with prepare(plan, make(Shared), ADAMW, squared) as engine:
        for step in range(2):
            squared(alone(points(8, step)), None).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.step((mine(points(8, step)), torch.zeros(4)))
        for key, value in weights_of(engine).items():
            close(value, alone.get_parameter(key))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.weight).mean()


def ga_10_gradients_are_those_of_all_micro_batches() -> None:
    """The gradient is the mean of 1, 10, 1, 20 on both ranks, not 5.5 and 10.5."""
    plan = Plan(backend="ddp", mesh=Mesh(replicate=WORLD), accumulation=2)
    batch = torch.tensor([1.0, 10.0] if dist.get_rank() == 0 else [1.0, 20.0])
    for used in (plan, Plan(**{**fields_of(plan), "zero_stage": 1})):
        with prepare(used, Scale(), SGD, lambda output, _: output) as engine:
            engine.step(batch)
            same(float(weights_of(engine)["weight"]), -8.0)
        with prepare(used, Scale(), SGD, lambda output, _: output) as engine:
            for part in batch.split(1):
                engine.backward(engine.forward(part))
            engine.step()
            same(float(weights_of(engine)["weight"]), -8.0)


def fields_of(plan: Plan) -> dict:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def ga_15_nothing_is_reduced_before_the_last_micro_batch() -> None:
    """Modules within modules have no wrappers: one context holds for all."""
    plan = plan_of(accumulation=3, ddp=DdpOptions(bucket_megabytes=1e-4))
    counts = []
    with prepare(plan, make(small), SGD, squared) as engine:
        for step in range(2):
            for part in mine(points(12, step)).split(2):
                counts.append(
                    # DDP broadcasts the order of its buckets once, in a forward.
                    collectives(
                        lambda p=part: engine.backward(squared(engine.forward(p), None))
                    ).count("gloo:all_reduce")
                )
            engine.step()
    same([count > 0 for count in counts], [False, False, True] * 2)


def hang_05_evaluation_reduces_nothing() -> None:
    """One rank evaluates alone; the next step works and the ranks stay equal."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with prepare(plan_of(), model, SGD, squared) as engine:
        engine.step((mine(points(4)), torch.zeros(2)))
        if dist.get_rank() == 0:
            batch = (points(3), torch.zeros(3))
            same(
                [collectives(lambda: engine._engine.evaluate(batch)) for _ in range(3)],
                [[], [], []],
            )
        engine.step((mine(points(4, 1)), torch.zeros(2)))
        for value in weights_of(engine).values():
            others = [torch.empty_like(value) for _ in range(WORLD)]
            dist.all_gather(others, value)
            same(torch.equal(*others), True)


def zero_1_obeys_groups_and_schedules() -> None:
    """Any optimizer, two groups and a schedule: the same weights as under DDP."""
    kinds = {
        "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-6),
        "momentum": partial(torch.optim.SGD, lr=1e-1, momentum=0.9, nesterov=True),
        "adagrad": partial(torch.optim.Adagrad, lr=1e-1),
    }
    for kind in kinds.values():
        ends = []
        for stage in (0, 1):
            model = make(small)
            optimizer = kind(
                [
                    {"params": [p for p in model.parameters() if p.dim() > 1]},
                    {"params": [p for p in model.parameters() if p.dim() < 2]},
                ],
                weight_decay=0.1,
            )
            optimizer.param_groups[1].update(weight_decay=0.0, lr=2e-2)
            with prepare(
                plan_of(zero_stage=stage),
                model,
                optimizer,
                squared,
                clip_norm=0.1,
                scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.3),
            ) as engine:
                for step in range(4):
                    engine.step((mine(points(4, step)), torch.zeros(2)))
                ends.append(weights_of(engine))
        for key, value in ends[0].items():
            close(ends[1][key], value)


def zero_1_states_are_dealt_as_the_shadow_says() -> None:
    model = make(small)
    params = [
        Param(name=key, shape=tuple(value.shape), dtype="float32")
        for key, value in model.named_parameters()
    ]
    with prepare(plan_of(zero_stage=1), model, ADAMW, squared) as engine:
        engine.step((mine(points(4)), torch.zeros(2)))
        states = engine._engine._updater.local_optimizer.state  # pyright: ignore
        held = sum(state["exp_avg"].numel() for state in states.values())
    expected = sum(p.elements for p in deal(params, WORLD)[dist.get_rank()])
    same(held, expected)


def powersgd_learns() -> None:
    """The loss falls as without compression, to within a tenth of its fall."""
    losses = {}
    target = points(16, 5).sum(1, keepdim=True).expand(16, 4).contiguous()
    for hook in ("none", "powersgd"):
        options = DdpOptions(hook=hook, powersgd_start=2, powersgd_rank=2)
        plan = Plan(
            backend="ddp", mesh=Mesh(replicate=WORLD), micro_batch=8, ddp=options
        )
        with prepare(
            plan,
            make(small),
            partial(torch.optim.AdamW, lr=1e-2),
            lambda output, batch: (output - batch[1]).square().mean(),
        ) as engine:
            batch = (mine(points(16, 5)), mine(target))
            losses[hook] = [float(engine.step(batch).loss) for _ in range(40)]
    fall = losses["none"][0] - losses["none"][-1]
    within(fall > 0.5 * losses["none"][0], losses["none"])
    within(abs(losses["powersgd"][-1] - losses["none"][-1]) < 0.1 * fall, losses)


def powersgd_refuses_several_buckets_under_gloo() -> None:
    options = DdpOptions(hook="powersgd", bucket_megabytes=1e-4)
    text = refusal(lambda: prepare(plan_of(ddp=options), make(small), SGD, squared))
    contains(text, "in one bucket")


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        unu_01_an_unused_parameter_is_named,
        unu_15_a_globally_unused_parameter_stays,
        used_on_one_rank_only,
        unu_03_recompute_with_unused_parameters,
        ga_10_gradients_are_those_of_all_micro_batches,
        ga_15_nothing_is_reduced_before_the_last_micro_batch,
        hang_05_evaluation_reduces_nothing,
        zero_1_obeys_groups_and_schedules,
        zero_1_states_are_dealt_as_the_shadow_says,
        powersgd_learns,
        powersgd_refuses_several_buckets_under_gloo,
    )
}


def collectives(action: Callable[[], object]) -> list[str]:
    """Return the collectives that gloo runs in an action."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        action()
    return [event.name for event in profiler.events() if event.name.startswith("gloo:")]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-6)


def same(got, expected) -> None:
    within(got == expected, f"{got} is not {expected}")


def within(right: bool, what: object) -> None:
    if not right:
        raise AssertionError(str(what))


def contains(text: str, part: str) -> None:
    within(part in text, f"{part!r} is not in {text!r}")


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except UsageError as error:
        return str(error)
    raise AssertionError("not refused")
