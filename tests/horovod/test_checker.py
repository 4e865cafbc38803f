"""What takes the place of Horovod's calls in a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.errors import UsageError
from bigmodel.running.horovod_checker import check_script

SCRIPT = Path(__file__).with_name("script_with_horovod.py.txt")


def test_finds_every_use_at_its_line_and_nothing_else():
    found = [(use.line, use.call) for use in check_script(SCRIPT)]
    assert found == [
        (2, "import horovod.torch"),
        (3, "import horovod.torch"),
        (4, "import horovod.torch"),
        (6, "hvd.init()"),
        (7, "hvd.local_rank()"),
        (9, "hvd.size()"),
        (10, "hvd.DistributedOptimizer(backward_passes_per_step=4, "
        "compression=Compression.fp16, named_parameters=model.named_parameters())"),
        (14, "hvd.Compression.fp16"),
        (16, "hvd.broadcast_parameters()"),
        (17, "hvd.broadcast_optimizer_state()"),
        (19, "hvd.allreduce()"),
        (20, "hvd.rank()"),
        (21, "hvd.something_new()"),
        (28, "hvd.elastic.run()"),
    ]  # fmt: skip


def test_says_what_to_write_and_what_becomes_of_options():
    uses = {use.call.split("(")[0]: use for use in check_script(SCRIPT)}
    optimizer = uses["hvd.DistributedOptimizer"]
    assert optimizer.replacement.startswith("engine = bigmodel.prepare(plan")
    assert "Plan(accumulation=...)" in optimizer.note
    assert "DdpOptions(hook='fp16')" in optimizer.note
    assert "Adasum" not in optimizer.note
    assert uses["hvd.rank"].replacement == "engine.rank"
    assert uses["hvd.broadcast_parameters"].replacement == "remove it"
    assert "weight decay" in uses["hvd.broadcast_optimizer_state"].note
    assert uses["hvd.allreduce"].replacement.endswith("tensor /= plan.world")
    assert uses["hvd.something_new"].replacement == ""


def test_the_functions_of_torch_that_it_names_exist():
    import torch

    from bigmodel.running.horovod_calls import REPLACEMENTS

    for row in REPLACEMENTS.values():
        if row.replacement.startswith("torch."):
            target: object = torch
            for name in row.replacement.split("(")[0].split(".")[1:]:
                target = getattr(target, name)


def test_a_script_without_horovod(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("hvd = object()\nhvd.rank()\n")
    assert check_script(script) == ()


def test_what_is_no_script(tmp_path):
    with pytest.raises(UsageError, match="no script"):
        check_script(tmp_path / "absent.py")
    broken = tmp_path / "broken.py"
    broken.write_text("def (:\n")
    with pytest.raises(UsageError, match="cannot be read as Python"):
        check_script(broken)
