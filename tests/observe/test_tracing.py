"""Tracing: every kind of model and batch, and the laws that a spec obeys."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace

import pytest
import torch
from tiny_models import Looking, LossNet, Net, TupleNet, cross_entropy, tokens
from torch import nn

import bigmodel
from bigmodel.errors import TracingError, UsageError
from bigmodel.models import Op, Storage
from bigmodel.observe import tracing

PAIR = (tokens(), tokens())
CPU = {"precision": "fp32", "target": "cpu"}


def totals(spec, micro_batch=3):
    """Sum bytes that appear and FLOP over all units, by policy and phase."""
    result = {}
    for placed in spec.sequence:
        for policy, phases in placed.unit.phases.items():
            for name in ("forward", "backward", "forward_end", "backward_end"):
                tape = getattr(phases, name)
                entry = result.setdefault((policy, name), [0, 0, 0, 0])
                for event in tape.events:
                    if isinstance(event, Storage):
                        at = 0 if event.sign > 0 else 1
                        entry[at] += event.size.at(micro_batch)
                    elif isinstance(event, Op):
                        entry[2] += event.flops.at(micro_batch)
                entry[3] += len(tape.events)
    return result


@pytest.mark.parametrize(
    ("model", "batch", "loss"),
    [
        (LossNet(2), PAIR, None),
        (TupleNet(2), PAIR, None),
        (Net(2), PAIR, cross_entropy),
        (Net(2), {"tokens": tokens(), "labels": tokens()}, cross_entropy),
        (LossNet(2), {"tokens": tokens(), "labels": tokens()}, None),
    ],
    ids=["loss", "tuple", "loss function", "dict and loss function", "dict"],
)
def test_batches_and_outputs_of_every_form(model, batch, loss):
    spec = bigmodel.trace(model, batch, loss=loss, **CPU)
    assert spec.units == ("blocks.0", "blocks.1")
    assert spec.elements == sum(p.numel() for p in model.parameters())
    assert spec.tokens_per_sample == 6
    assert spec.laws == ()


def test_flops_of_matrix_products():
    spec = bigmodel.trace(LossNet(3), PAIR, **CPU)
    forward = 2 * 6 * (3 * 2 * 8 * 32 + 8 * 32)
    assert spec.flops_per_sample == 3 * forward


def test_the_user_keeps_the_model_as_it_was():
    model = LossNet(6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forwards = [block.forward for block in model.blocks]
    bigmodel.trace(model, PAIR, precision="bf16")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == before[name].dtype
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [block.forward for block in model.blocks] == forwards


def test_a_factory_is_read_like_the_module():
    by_module = bigmodel.trace(LossNet(2), PAIR, **CPU)
    by_factory = bigmodel.trace(lambda: LossNet(2), PAIR, **CPU)
    assert replace(by_factory, name="", source="") == replace(
        by_module, name="", source=""
    )


def test_tied_weights_count_once():
    free, tied = (
        bigmodel.trace(Net(2, tied=t), PAIR, loss=cross_entropy, **CPU)
        for t in (False, True)
    )
    assert free.elements - tied.elements == 32 * 8
    assert [p.tied_to for p in tied.after.params] == ["embed.weight"]


def test_frozen_parameters_get_no_gradient():
    model = LossNet(2)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    spec = bigmodel.trace(model, PAIR, **CPU)
    frozen, trained = spec.blocks
    assert frozen.trainable_elements == 0
    assert trained.trainable_elements == trained.elements
    gradients = [
        event.kind
        for event in frozen.phases["none"].backward.events
        if isinstance(event, Storage)
    ]
    assert "gradient" not in gradients


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_equal_blocks_replayed_give_the_totals_of_all_traced(precision, monkeypatch):
    depth = 7
    replayed = bigmodel.trace(LossNet(depth), PAIR, precision=precision)
    monkeypatch.setattr(
        tracing,
        "find_rows",
        lambda paths, blocks: tracing.without_repetition(find(paths, blocks)),
    )
    traced = bigmodel.trace(LossNet(depth), PAIR, precision=precision)
    assert replayed.elements == traced.elements
    assert replayed.flops_per_sample == traced.flops_per_sample
    assert totals(replayed) == totals(traced)


find = tracing.find_rows


class Carrying(nn.Module):
    """Blocks that are given something that is not the last one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x):
        first = self.blocks[0](x)
        hidden = first
        for block in self.blocks[1:]:
            hidden = torch.relu(block(hidden + first))
        return hidden.mean()


def test_blocks_that_cannot_stand_for_each_other_are_all_traced():
    spec = bigmodel.trace(Carrying(), torch.zeros(1, 4), **CPU)
    assert len(spec.units) == 8
    # The first block's input needs no gradient: one product less.
    assert spec.flops_per_sample == 2 * 4 * 4 * (3 * 8 - 1)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_all_that_is_allocated_but_gradients_is_freed(policy):
    spec = bigmodel.trace(LossNet(6), PAIR, precision="bf16")
    left = {}
    for placed in spec.sequence:
        phases = placed.unit.phases[policy]
        for name in ("forward", "backward", "forward_end", "backward_end"):
            for event in getattr(phases, name).events:
                if not isinstance(event, Storage):
                    continue
                if event.partner is not None and name.endswith("_end"):
                    # Both units are here, and so is the end in the other one's tape.
                    continue
                kind = "gradient" if event.kind == "gradient" else "other"
                change = event.sign * event.size.at(2)
                left[kind] = left.get(kind, 0) + change
    assert left == {"gradient": 2 * spec.trainable_elements, "other": 0}


def test_recomputing_keeps_less_and_computes_more():
    spec = bigmodel.trace(LossNet(6), PAIR, precision="bf16")
    none, full = (spec.blocks[2].phases[policy] for policy in ("none", "full"))
    assert full.forward.net(4) < none.forward.net(4)
    assert full.backward.flops(4) > none.backward.flops(4)


def test_what_cannot_be_traced_is_named_with_its_line():
    with pytest.raises(TracingError) as caught:
        bigmodel.trace(Looking(), torch.zeros(1, 4), **CPU)
    message = str(caught.value)
    source = sys.modules["tiny_models"].__file__
    with open(source) as file:
        marked = next(n for n, text in enumerate(file, 1) if "must name" in text)
    assert f"line {marked} of {source}" in message
    assert ".item()" in message


def test_a_failing_factory_is_explained():
    def broken():
        raise ValueError("no such size")

    with pytest.raises(TracingError, match="no such size"):
        bigmodel.trace(broken, PAIR, **CPU)
    with pytest.raises(TracingError, match=r"must return a torch\.nn\.Module"):
        bigmodel.trace(lambda: 3, PAIR, **CPU)


def test_a_model_without_a_loss_is_explained():
    with pytest.raises(UsageError, match="give a loss function"):
        bigmodel.trace(Net(1), (tokens(),), **CPU)


def test_wrong_choices_are_refused_together():
    with pytest.raises(UsageError) as caught:
        bigmodel.trace(LossNet(1), PAIR, precision="fp8", target="tpu")
    assert [v.field for v in caught.value.violations] == ["precision", "target"]


def config(name: str, **settings):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(name, **settings)


HUGGING_FACE = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    },
    "t5": {
        "num_layers": 2,
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_heads": 4,
        "vocab_size": 100,
        "decoder_start_token_id": 0,
    },
    "bert": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
    },
    "vit": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
    "mixtral": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 100,
    },
}


@pytest.fixture(scope="module")
def mixture():
    return bigmodel.trace(config("mixtral", **HUGGING_FACE["mixtral"]), seq_len=16)


@pytest.mark.parametrize("name", [name for name in HUGGING_FACE if name != "mixtral"])
def test_models_of_transformers(name):
    length = None if name == "vit" else 16
    spec = bigmodel.trace(config(name, **HUGGING_FACE[name]), seq_len=length)
    assert len(spec.units) == (4 if name == "t5" else 2)
    assert spec.tokens_per_sample == (1 if name == "vit" else 16)
    assert spec.laws == ()
    assert spec.flops_per_sample > 0


def test_autocast_reads_mixtures_too(mixture):
    settings = HUGGING_FACE["mixtral"]
    spec = bigmodel.trace(
        config("mixtral", **settings), seq_len=16, precision="autocast"
    )
    assert spec.flops_per_sample == mixture.flops_per_sample


def test_experts_are_counted(mixture):
    block = mixture.blocks[1]
    experts = 2 * (3 * 32 * 64)
    attention = 2 * 32 * 32 + 2 * 32 * 16
    router = 4 * 32
    weights = experts + attention + router
    flops = block.phases["none"].forward.flops(1)
    # Beside the weights there is only the attention itself: 2 x S x S x width, causal.
    assert flops - 2 * 16 * weights == 2 * 16 * 16 * 32
    assert len(mixture.units) == 2
    assert mixture.laws == ()


def test_405_billion_parameters_in_seconds_without_memory():
    pytest.importorskip("transformers").AutoModelForCausalLM  # noqa: B018
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    spec = bigmodel.trace("llama-3.1-405b", seq_len=8192)
    seconds = time.monotonic() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert spec.elements == 405_853_388_800
    assert len(spec.units) == 126
    # Ten seconds on a free machine.
    assert seconds < 30
    # KiB; the weights would be 1.6 TB.
    assert grown < 500 * 1024
