"""Which models are refused, and what a stage keeps."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.engine import Job
from bigmodel.backends.pipeline.cutting import check_model, cut_model
from bigmodel.errors import UsageError
from bigmodel.plans import Mesh, Plan, Stages
from tests.pipeline.checks import Chat, chats, next_token
from tests.pipeline.families import (
    FAMILIES,
    REFUSED,
    make,
    make_batch,
    make_family,
)


def job_for(model: nn.Module, units: tuple[str, ...], cut: int = 1) -> Job:
    return Job(
        plan=Plan(
            backend="pipeline",
            mesh=Mesh(pipeline=2),
            units=units,
            stages=Stages(schedule="gpipe", cuts=(cut,)),
        ),
        model=model,
        optimizer=torch.optim.SGD,
        loss=None,
        clip_norm=None,
        device=torch.device("cpu"),
    )


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))


@pytest.mark.parametrize(
    ("units", "stage", "kept"),
    [
        (("0", "1", "2", "3", "4"), 0, ["0"]),
        (("0", "1", "2", "3", "4"), 1, ["1", "2", "3", "4"]),
        (("1", "3"), 0, ["0", "1", "2"]),
        (("1", "3"), 1, ["3", "4"]),
    ],
)
def test_a_sequential_is_cut_by_its_children(units, stage: int, kept: list[str]):
    job = job_for(chain(), units)
    cut_model(job, stage)
    assert [name for name, _ in job.model.named_children()] == kept


def test_what_other_stages_own_is_freed():
    model = chain()
    gone, kept = weakref.ref(model[0].weight), weakref.ref(model[1].weight)
    cut_model(job_for(model, ("0", "1", "2", "3", "4")), 1)
    gc.collect()
    assert gone() is None
    assert kept() is not None


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_stages_share_out_the_weights(name: str):
    whole = make_family(name)
    units = FAMILIES[name].units
    seen: dict[str, int] = {}
    for stage in range(2):
        model = make_family(name)
        cut_model(job_for(model, units, cut=2), stage)
        for key in model.state_dict():
            seen[key] = seen.get(key, 0) + 1
    assert seen == dict.fromkeys(whole.state_dict(), 1)


def test_another_order_of_units_is_refused():
    with pytest.raises(UsageError, match="in their order"):
        check_model(job_for(chain(), ("1", "0")))


def test_some_blocks_only_are_refused():
    with pytest.raises(UsageError, match="all blocks"):
        check_model(job_for(make_family("llama"), FAMILIES["llama"].units[:2]))


def test_any_other_module_is_refused():
    with pytest.raises(UsageError, match="must be all blocks"):
        check_model(job_for(nn.Transformer(4, 2), ("encoder", "decoder")))


def test_the_auxiliary_loss_of_experts_is_refused():
    model = make_family("mixtral")
    model.config.output_router_logits = True
    with pytest.raises(UsageError, match="auxiliary loss"):
        check_model(job_for(model, FAMILIES["mixtral"].units))


def test_a_stage_begins_where_nothing_before_is_needed_but_hidden_states():
    chat, loss = {"precision": "fp32", "target": "cpu"}, next_token
    spec = bigmodel.trace(Chat, chats(2, 0), loss=loss, **chat)
    assert (spec.cuts, spec.uncuttable) == ((1, 2, 3), "")
    reuses = partial(Chat, reuses_embedding=True)
    spec = bigmodel.trace(reuses, chats(2, 0), loss=loss, **chat)
    assert spec.cuts == ()
    assert "embed.weight goes into what follows" in spec.uncuttable


def test_an_encoder_decoder_is_cut_in_its_encoder():
    spec = bigmodel.trace(
        partial(make_family, "bart"),
        make_batch("bart", 2, 0),
        precision="fp32",
        target="cpu",
    )
    assert spec.cuts == (1, 2)
    assert not spec.splits
    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2),
        units=spec.units,
        stages=Stages(schedule="1f1b", cuts=(3,)),
        accumulation=2,
    )
    (found,) = BACKENDS.get("pipeline").violations(plan, spec, None)
    assert (found.field, found.got) == ("stages.cuts", (3,))
    assert "before blocks 1 to 2 only" in found.rule


def test_blocks_that_hand_each_other_more_are_said_beforehand():
    spec = bigmodel.trace(
        partial(make, REFUSED), make_batch("t5", 2, 0), precision="fp32", target="cpu"
    )
    assert spec.cuts == ()
    assert "hand each other 2 tensors" in spec.uncuttable
