"""Backends of one process that owns several devices, without any launch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from benchmarks.memory_accuracy import cases as matrix
from benchmarks.memory_accuracy.__main__ import costs_of
from bigmodel import Mesh, Plan, Stages, cluster, trace
from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.dataparallel.engine import mean_losses, recompute_in_copies
from bigmodel.backends.dealt_stages import write
from bigmodel.backends.naive.placing import device_indices, place
from bigmodel.running.measuring import measure_memory
from bigmodel.running.session import prepare
from bigmodel.search import predict
from bigmodel.simulator import Costs, ProgramBuilder, simulate


def _plan(backend: str, units: tuple[str, ...], **changed) -> Plan:
    schedule = {"naive": "naive", "fairscale_pipe": "gpipe"}.get(backend)
    stages = schedule and Stages(schedule=schedule, cuts=(len(units) // 2,))
    plan = Plan(backend=backend, units=units, devices_per_process=2, stages=stages)
    return replace(plan, **changed)


@cache
def _costs(model: str) -> Costs:
    make, batch, loss = matrix.MODELS[model]
    spec = trace(make, batch(2), target="cuda", loss=loss, precision="fp32")
    return Costs(spec, cluster("2xA100-80GB"))


def test_modules_go_with_their_neighbours() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    for tied, head in ((False, 1), (True, 0)):
        config = LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
        plan = _plan("naive", ("model.layers.0", "model.layers.1"))
        assert device_indices(LlamaForCausalLM(config), plan) == {
            "model.embed_tokens": 0,
            "model.layers.0": 0,
            "model.layers.1": 1,
            "model.norm": head,
            # Only buffers: made before the layers, defined after them.
            "model.rotary_emb": 0,
            "lm_head": head,
        }


def test_tensors_follow_the_modules() -> None:
    # There is one CPU only; `meta` is the one other device that is always there.
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    plan = _plan("naive", ("0", "1", "2", "3"))
    place(model, plan, [torch.device("cpu"), torch.device("meta")])
    assert [p.device.type for p in model.parameters()] == ["cpu"] * 2 + ["meta"] * 4
    assert model(torch.randn(3, 6)).device.type == "meta"


@pytest.mark.parametrize(("model", "precision"), [("gpt", "fp32"), ("mlp", "fp32")])
def test_bytes_of_all_devices_together(model: str, precision: str) -> None:
    # On a CPU all devices are one: their programs, written into one, are measured.
    make, batch, loss = matrix.MODELS[model]
    plan = _plan("naive", matrix.units_of(model), micro_batch=4, accumulation=2)
    plan = replace(plan, precision=precision)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    measured = measure_memory(
        lambda: prepare(plan, make, optimizer, loss),
        lambda engine: batch(plan.local_batch),
    )
    builder = ProgramBuilder()
    write(plan, costs_of(model, precision), 2, [builder, builder])
    (timeline,) = simulate([builder.build()])
    assert timeline.peak.num_bytes == pytest.approx(measured.peak, rel=0.005)


def test_one_device_works_at_a_time() -> None:
    plan = _plan("naive", matrix.units_of("gpt"), micro_batch=4, accumulation=3)
    estimate = predict(plan, _costs("gpt"))
    assert [entry.ranks for entry in estimate.ranks] == [(0,), (1,)]
    busy = sum(timeline.busy["compute"] for timeline in estimate.timelines)
    # Both together never compute for longer than a step takes; only the optimizer's
    # steps of the two devices overlap.
    assert 0.9 * estimate.seconds < busy < 1.1 * estimate.seconds


def test_pipe_overlaps_what_naive_does_not() -> None:
    units = matrix.units_of("mlp")
    naive = predict(
        _plan("naive", units, micro_batch=64, accumulation=8), _costs("mlp")
    )
    pipe = predict(
        _plan("fairscale_pipe", units, micro_batch=64, accumulation=8), _costs("mlp")
    )
    assert pipe.seconds < naive.seconds
    # It keeps the activations of all micro-batches, naive those of one.
    assert pipe.fullest.allocated > naive.fullest.allocated


def test_the_first_device_holds_more_than_the_others() -> None:
    plan = _plan("dataparallel", matrix.units_of("gpt"), micro_batch=8)
    first, others = predict(plan, _costs("gpt")).ranks
    assert (first.ranks, others.ranks) == ((0,), (1,))
    elements = _costs("gpt").model.trainable_elements
    # AdamW's two states, on the first device alone.
    assert first.allocated - others.allocated > 8 * elements


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_copies_recompute_with_their_own_weights(policy: str) -> None:
    block = nn.Sequential(nn.Linear(3, 3, bias=False))
    recompute_in_copies(block, policy)
    copy = block._replicate_for_data_parallel()
    inner = nn.Linear(3, 3, bias=False)
    copy._modules = {"0": inner}
    inputs = torch.randn(2, 3, requires_grad=True)
    assert torch.equal(copy(inputs), inner(inputs))
    copy(inputs).sum().backward()
    assert inner.weight.grad is not None
    assert block[0].weight.grad is None


def test_losses_of_copies_are_averaged() -> None:
    losses, outputs = torch.tensor([1.0, 3.0]), torch.zeros(4, 2)
    assert mean_losses(losses, 2) == 2.0
    assert mean_losses({"loss": losses, "logits": outputs}, 2)["loss"] == 2.0
    assert mean_losses((losses, outputs), 2)[0] == 2.0
    assert mean_losses(outputs, 2) is outputs


@pytest.mark.parametrize(
    ("plan", "fields"),
    [
        (_plan("naive", ("0", "1", "2"), devices_per_process=3), ["stages.cuts"]),
        (_plan("naive", ("0", "1"), mesh=Mesh(replicate=2)), ["mesh"]),
        (_plan("naive", ("0", "1"), stages=None), ["stages"]),
        (Plan(backend="ddp", devices_per_process=2), ["devices_per_process"]),
        (_plan("dataparallel", ("0", "1"), micro_batch=3), ["micro_batch"]),
        (_plan("fairscale_pipe", ("h.0", "h.1")), ["units"]),
        (_plan("fairscale_pipe", ("0", "1"), precision="autocast"), ["precision"]),
    ],
)
def test_what_is_refused(plan: Plan, fields: list[str]) -> None:
    found = list(refusals(BACKENDS.get(plan.backend), plan))
    assert [entry.field for entry in found] == fields
    assert all(entry.rule and (entry.cure or plan.precision) for entry in found)


def test_pipe_lets_the_interpreter_end() -> None:
    # By itself Pipe waits for ever for threads that are gone.
    script = (
        "import torch\nfrom torch import nn\n"
        "from bigmodel import Plan, Stages, prepare\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))\n"
        "stages = Stages(schedule='gpipe', cuts=(1,))\n"
        "plan = Plan(backend='fairscale_pipe', units=('0', '1'), stages=stages,\n"
        "            micro_batch=2, accumulation=2, devices_per_process=2)\n"
        "loss = lambda output, batch: output.mean()\n"
        "engine = prepare(plan, model, lambda p: torch.optim.SGD(p, lr=0.1), loss)\n"
        "print(float(engine.step((torch.ones(4, 4), torch.ones(4, 2))).loss))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
