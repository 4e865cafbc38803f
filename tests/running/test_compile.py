"""`Plan.compile`: who obeys, what is refused, and that units share what is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.compiling import apply_compile
from bigmodel.errors import UsageError
from bigmodel.plans import Plan

CPU = torch.device("cpu")
PLAN = Plan(backend="ddp", compile=True)


def test_backends_that_do_not_obey_refuse():
    obeying = set()
    for name, backend in BACKENDS:
        found = refusals(backend, Plan(backend=name, compile=True))
        if not any(violation.field == "compile" for violation in found):
            obeying.add(name)
    assert obeying == {"ddp", "fsdp2"}


def test_without_a_compiler_it_is_refused():
    from torch._inductor import config

    missing = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(UsageError, match=r"there is no C\+\+ compiler"):
        apply_compile({"": nn.Linear(2, 2)}, PLAN, CPU)


def test_equal_units_share_a_graph_and_names_stay():
    graphs = 0

    def count(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in "123"))
    # Like the inputs of later units, or the first one would have a graph of its own.
    x = torch.randn(2, 4, requires_grad=True)
    names = list(model.state_dict())
    expected = model(x)
    compiled = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f: compiled(f, backend=count))
        apply_compile(dict(model.named_children()), PLAN, CPU)
    torch.testing.assert_close(model(x), expected)
    assert list(model.state_dict()) == names
    assert graphs == 1
