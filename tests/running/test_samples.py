from __future__ import annotations

from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import UsageError
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.running.samples import (
    DataPosition,
    DatasetFeed,
    RankBatches,
    steps_of_epoch,
)
from bigmodel.running.window import Window


def plan_of(replicate: int, micro: int, accumulation: int, pipeline: int = 1) -> Plan:
    stages = Stages(schedule="1f1b", cuts=(1,)) if pipeline == 2 else None
    return Plan(
        backend="ddp",
        mesh=Mesh(replicate=replicate, pipeline=pipeline),
        micro_batch=micro,
        accumulation=accumulation,
        units=("a", "b"),
        stages=stages,
    )


def sampler(plan: Plan, rank: int, count: int = 20, **changes) -> RankBatches:
    where = {"shuffle": True, "seed": 0, "epoch": 0, "samples": 0}
    where |= {key: changes.pop(key) for key in where if key in changes}
    start = DataPosition(length=count, **where)
    return RankBatches(plan, rank, start=start, **{"epochs": 1, **changes})


def global_batches(plan: Plan, **changes) -> list[list[int]]:
    shares = [list(sampler(plan, rank, **changes)) for rank in range(plan.world)]
    return [list(chain(*parts)) for parts in zip(*shares, strict=True)]


@given(st.integers(8, 50), st.integers(0, 9), st.booleans())
def test_order_does_not_depend_on_the_plan(count, seed, shuffle):
    settings = {"count": count, "seed": seed, "shuffle": shuffle, "epochs": 2}
    alone = global_batches(plan_of(1, 8, 1), **settings)
    assert global_batches(plan_of(2, 2, 2), **settings) == alone
    assert global_batches(plan_of(4, 1, 2), **settings) == alone
    assert len(alone) == 2 * (count // 8)
    epoch = list(chain(*alone[: count // 8]))
    assert len(set(epoch)) == len(epoch)


def test_ranks_of_one_pipeline_read_the_same():
    plan = plan_of(2, 2, 2, pipeline=2)
    shares = [list(sampler(plan, rank)) for rank in range(4)]
    assert shares[0] == shares[2]
    assert shares[1] == shares[3]
    assert shares[0] != shares[1]


@given(st.integers(8, 50), st.integers(0, 30))
def test_another_plan_goes_on_at_the_same_sample(count, steps):
    """Whatever the ranks and micro-batches, none comes twice and none is lost."""
    first, second = plan_of(2, 2, 2), plan_of(4, 1, 1)
    settings = {"count": count, "epochs": None, "last": "short"}
    shares = [islice(sampler(first, rank, **settings).shares(), 31) for rank in (0, 1)]
    pairs = list(zip(*shares, strict=True))
    stop = pairs[steps][0].after
    before = [index for pair in pairs[: steps + 1] for index in real(pair)]
    rest = [
        islice(
            sampler(
                second, rank, epoch=stop.epoch, samples=stop.samples, **settings
            ).shares(),
            20,
        )
        for rank in range(4)
    ]
    after = [index for group in zip(*rest, strict=True) for index in real(group)]
    whole = list(
        chain(
            *(
                real(pair)
                for pair in zip(
                    *(islice(sampler(plan_of(1, 1, 1), 0, **settings).shares(), 4000),),
                    strict=True,
                )
            )
        )
    )
    together = before + after
    assert together == whole[: len(together)]
    assert sorted(together[:count]) == list(range(count))


def real(group) -> list[int]:
    """Return the samples that count, in the order of ranks and micro-batches."""
    found = []
    for share in group:
        at = 0
        for size, counts in zip(share.sizes, share.real, strict=True):
            found += share.indices[at : at + size] if counts else []
            at += size
    return found


@given(st.integers(1, 50), st.integers(1, 3), st.integers(1, 3))
def test_steps_of_an_epoch_are_known_beforehand(count, micro, accumulation):
    plan = plan_of(2, micro, accumulation)
    for last in ("drop", "short"):
        if last == "drop" and count < plan.global_batch:
            continue
        done = len(list(sampler(plan, 1, count, last=last)))
        assert done == steps_of_epoch(count, plan, last)


def test_data_03_every_epoch_has_its_own_order():
    plan = plan_of(2, 1, 1)
    runs = [[list(sampler(plan, rank, 8, epochs=3)) for rank in (0, 1)] for _ in (0, 1)]
    assert runs[0] == runs[1]
    for rank in (0, 1):
        epochs = [tuple(chain(*runs[0][rank][e * 4 : e * 4 + 4])) for e in range(3)]
        assert len(set(epochs)) == 3
    for epoch in range(3):
        parts = [chain(*runs[0][rank][epoch * 4 : epoch * 4 + 4]) for rank in (0, 1)]
        assert sorted(chain(*parts)) == list(range(8))


def test_data_06_every_rank_goes_on_by_itself():
    plan = plan_of(4, 1, 1)
    begin = [list(islice(sampler(plan, rank, 12), 1)) for rank in range(4)]
    rest = [list(sampler(plan, rank, 12, samples=4)) for rank in range(4)]
    assert sorted(chain(*chain(*begin, *rest))) == list(range(12))


def test_small_dataset():
    with pytest.raises(UsageError, match=r"samples in the dataset is 7; .* needs 8"):
        sampler(plan_of(2, 2, 2), 0, count=7)


def test_short_window_of_a_pipeline():
    with pytest.raises(UsageError, match=r"have one shape.*: 8"):
        sampler(plan_of(1, 4, 2, pipeline=2), 0, count=9, last="short")


def feed(data, plan: Plan, **changes) -> DatasetFeed:
    start = DataPosition(length=len(data), shuffle=False, seed=0)
    ranks = sampler(plan, 0, len(data), shuffle=False, **changes)
    return DatasetFeed(data, ranks, start, torch.device("cpu"))


def test_collates_and_leaves_random_numbers_alone():
    data = [{"x": torch.tensor([float(i)]), "y": i} for i in range(9)]
    before = torch.random.get_rng_state()
    got = list(feed(data, plan_of(1, 2, 2)))
    assert torch.equal(before, torch.random.get_rng_state())
    assert got[1]["x"].tolist() == [[4.0], [5.0], [6.0], [7.0]]
    assert got[1]["y"].tolist() == [4, 5, 6, 7]


def test_short_window():
    data = [{"x": torch.tensor([float(i)])} for i in range(5)]
    *_, last = feed(data, plan_of(1, 2, 2), last="short")
    assert isinstance(last, Window)
    assert last.real == (True, False)
    assert last.batches[0]["x"].tolist() == [[4.0]]
    assert len(last.micro_batches) == 2
