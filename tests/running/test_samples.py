from __future__ import annotations

from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import UsageError
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.running.samples import RankBatches, batches


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
    settings = {"shuffle": True, "seed": 0, "epochs": 1, "start": 0, **changes}
    return RankBatches(count, plan, rank, **settings)


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


def test_start_goes_on_where_another_run_ended():
    plan = plan_of(2, 2, 1)
    whole = list(islice(sampler(plan, 1, epochs=None), 12))
    assert list(islice(sampler(plan, 1, epochs=None, start=7), 5)) == whole[7:]


def test_small_dataset():
    with pytest.raises(UsageError, match=r"samples in the dataset is 7; .* needs 8"):
        sampler(plan_of(2, 2, 2), 0, count=7)


def test_collates_and_leaves_random_numbers_alone():
    plan = plan_of(1, 2, 2)
    data = [{"x": torch.tensor([float(i)]), "y": i} for i in range(9)]
    before = torch.random.get_rng_state()
    got = list(batches(data, sampler(plan, 0, 9, shuffle=False), torch.device("cpu")))
    assert torch.equal(before, torch.random.get_rng_state())
    assert got[1]["x"].tolist() == [[4.0], [5.0], [6.0], [7.0]]
    assert got[1]["y"].tolist() == [4, 5, 6, 7]
