"""Where batches come from and what is left of them, on two real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.errors import UsageError
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.running.packing import pack
from bigmodel.running.session import prepare
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
)


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
        same([engine.step(batch).samples for batch in batches], [4, 4, 2])
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
        result = engine.step(batches[-1])
        close(result.loss, 25.0)
        same(result.samples, 1)
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


def data_01_stages_evaluate_uneven_data() -> None:
    """5 samples in micro-batches of 2 through 2 stages."""
    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2),
        units=("0", "1"),
        stages=Stages(schedule="gpipe", cuts=(1,)),
        micro_batch=2,
    )
    data = [(torch.tensor([float(i)]), torch.zeros(1)) for i in range(1, 6)]
    model = nn.Sequential(Scale(), Scale())
    with prepare(plan, model, SGD, mean_output) as engine:
        close(engine.evaluate_all(data), 3.0)


def data_06_another_plan_goes_on_in_the_middle() -> None:
    """What a checkpoint's data begins with under another plan; see the test."""
    folder = folder_of("data-06")
    data = list(torch.arange(24.0))
    with prepare(PAIR(micro_batch=2), Scale(), SGD, mean_output) as engine:
        iterator = engine.batches(data, seed=5)
        seen = [next(iterator) for _ in range(2)]
        for batch in seen:
            engine.step(batch)
        engine.save(folder)
        rest = [next(iterator) for _ in range(4)]
    other = PAIR(accumulation=2)
    with prepare(other, Scale(), SGD, mean_output) as engine:
        again = engine.batches(data, seed=5, start=folder)
        same([next(again).tolist() for _ in range(4)], [b.tolist() for b in rest])
        engine.load(folder)
        again = engine.batches(data, seed=5)
        same([next(again).tolist() for _ in range(4)], [b.tolist() for b in rest])


def data_10_packed_rows_are_counted() -> None:
    """Planned steps, executed steps and the end of the schedule are the same."""
    lengths = [7, 5, 3, 3, 2]
    rows = pack(lengths, 8)
    same(sorted(map(sorted, rows)), [[0], [1, 2], [3, 4]])
    same(rows, pack(lengths, 8))
    data = [torch.full((length,), 1.0) for length in lengths]
    loader = DataLoader(data, batch_sampler=rows, collate_fn=torch.cat)

    def falling(optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 3)

    for plan in (PAIR(), SHARDS()):
        with prepare(
            plan, Scale(), SGD, mean_output, scheduler=falling, targets=len
        ) as engine:
            planned = engine.steps_per_epoch(loader)
            done = sum(1 for w in engine.batches(loader, epochs=1) if engine.step(w))
            rate = engine._engine.optimizer.param_groups[0]["lr"]  # pyright: ignore
            same((planned, done, engine.steps), (3, 3, 3))
            close(rate, 0.0)
