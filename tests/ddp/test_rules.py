"""Plans that backend `ddp` refuses, each with its reason; nothing runs here."""

from __future__ import annotations

import pytest

from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.errors import InvalidPlanError
from bigmodel.plans import DdpOptions, Mesh, Plan


def refused(kind: str, **changes) -> list[str]:
    plan = Plan(backend="ddp", mesh=Mesh(replicate=2), **changes)
    return [str(found) for found in refusals(BACKENDS.get("ddp"), plan, kind=kind)]


def test_ga_11_static_graph_with_accumulation_is_refused():
    static = DdpOptions(static_graph=True)
    (text,) = refused("cpu", ddp=static, accumulation=2)
    assert "ddp.static_graph is True" in text
    assert "use accumulation 1, or find_unused" in text
    assert refused("cpu", ddp=static) == []


def test_bf16_hook_needs_nccl():
    hook = DdpOptions(hook="bf16")
    (text,) = refused("cpu", ddp=hook)
    assert "needs NCCL" in text
    assert refused("cuda", ddp=hook) == []


def test_zero_stages():
    assert refused("cpu", zero_stage=1) == []
    (text,) = refused("cpu", zero_stage=2)
    assert "shards optimizer states only" in text


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"bucket_megabytes": 0}, "ddp.bucket_megabytes"),
        ({"first_bucket_megabytes": -1}, "ddp.first_bucket_megabytes"),
        ({"hook": "int8"}, "ddp.hook"),
        ({"powersgd_rank": 0}, "ddp.powersgd_rank"),
        ({"powersgd_start": 1}, "ddp.powersgd_start"),
        ({"static_graph": True, "find_unused": True}, "ddp.find_unused"),
    ],
)
def test_what_can_never_be_right(options, field):
    with pytest.raises(InvalidPlanError, match=field):
        Plan(backend="ddp", ddp=DdpOptions(**options))


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed", "horovod"])
def test_other_backends_say_that_options_of_ddp_have_no_effect(backend):
    plan = Plan(backend=backend, ddp=DdpOptions(find_unused=True))
    found = [violation.field for violation in refusals(BACKENDS.get(backend), plan)]
    assert "ddp" in found
