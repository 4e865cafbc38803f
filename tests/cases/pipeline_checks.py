"""Faults of pipelines, on two stages."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bigmodel.errors import UsageError
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.running.session import Engine, prepare


class Scale(nn.Module):
    """One weight w, and w * x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def mean_of(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return output.mean()


def two_stages(units: tuple[str, ...], cut: int, **fields) -> Plan:
    stages = Stages(schedule="1f1b", cuts=(cut,))
    return Plan(
        backend="pipeline", mesh=Mesh(pipeline=2), units=units, stages=stages, **fields
    )


def scale_engine(**fields) -> Engine:
    plan = two_stages(("0", "1"), 1, accumulation=2, **fields)
    model = nn.Sequential(Scale(), nn.Identity())
    return prepare(plan, model, sgd, mean_of)


def weight(engine: Engine) -> float:
    """Return w of the first stage, on every rank."""
    state = engine.state_dict()
    value = [float(state["0.w"]) if engine.is_first else None]
    dist.broadcast_object_list(value, 0)
    return value[0]


def pp_01_a_batch_that_does_not_divide_is_refused_before_anything_is_sent():
    with scale_engine(micro_batch=2) as engine:
        with pytest.raises(UsageError, match="samples in the batch is 5"):
            engine.step((torch.arange(1.0, 6.0), torch.zeros(5)))
        engine.step((torch.arange(1.0, 5.0), torch.zeros(4)))
        # The gradient is the mean of x.
        assert weight(engine) == 1.0 - 2.5


def pp_03_the_sequence_length_may_change_from_step_to_step():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    alone = make()
    plan = two_stages(("0", "2"), 1, micro_batch=1, accumulation=2)
    with prepare(plan, make(), sgd, mean_of) as engine:
        for length in (3, 5):
            batch = torch.arange(2.0 * length * 4).reshape(2, length, 4) / 50
            expected = alone(batch).mean()
            expected.backward()
            got = engine.step((batch, torch.zeros(2)))
            torch.testing.assert_close(got.loss, expected.detach(), rtol=0, atol=1e-6)
            with torch.no_grad():
                for parameter in alone.parameters():
                    parameter -= parameter.grad
                    parameter.grad = None


def tokens(samples: int, length: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(32, (samples, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def pp_05_tied_weights_on_both_ends_stay_equal_and_count_once():
    def make():
        torch.manual_seed(0)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
        config = GPT2Config(vocab_size=32, use_cache=False, **sizes)
        return GPT2LMHeadModel(config).eval()

    alone = make()
    plan = two_stages(("transformer.h.0", "transformer.h.1"), 1, accumulation=2)
    with prepare(plan, make(), sgd, clip_norm=1e9) as engine:
        engine._engine._model.eval()  # type: ignore[attr-defined]
        for _ in range(3):
            loss = alone(**tokens(2)).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
            with torch.no_grad():
                for parameter in alone.parameters():
                    parameter -= parameter.grad
                    parameter.grad = None
            result = engine.step(tokens(2))
            torch.testing.assert_close(result.grad_norm, norm, rtol=1e-5, atol=0)
            torch.testing.assert_close(result.loss, loss.detach(), rtol=0, atol=1e-5)
        name = "transformer.wte.weight" if engine.is_first else "lm_head.weight"
        held = dict(engine._engine._model.named_parameters())  # type: ignore[attr-defined]
        copies = [torch.empty_like(held[name]) for _ in range(2)]
        dist.all_gather(copies, held[name].detach())
        assert torch.equal(*copies)


def pp_06_llama_with_rotary_embeddings_is_cut_without_tracing():
    def make():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    with torch.no_grad():
        expected = make().eval()(**tokens(2)).loss
    units = tuple(f"model.layers.{index}" for index in range(4))
    with prepare(two_stages(units, 2, accumulation=2), make(), sgd) as engine:
        got = engine.evaluate(tokens(2))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def ga_13_the_loss_is_scaled_and_not_the_gradient():
    with scale_engine(micro_batch=2) as engine:
        batch = (torch.arange(1.0, 5.0), torch.zeros(4))
        parts = [tuple(part[i : i + 2] for part in batch) for i in (0, 2)]
        inner = engine._engine
        for _ in range(2):
            inner.forward_backward(parts, [0.5, 0.5])
        inner.update()
        # The sum of two means of 2.5; rescaling all of it would give 3.75.
        assert weight(engine) == 1.0 - 5.0


def ga_01_micro_batches_weigh_by_their_tokens():
    def mean_of_valid(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (output * batch[1]).sum() / batch[1].sum()

    x = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    valid = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    plan = two_stages(("0", "1"), 1, accumulation=2)
    model = nn.Sequential(Scale(), nn.Identity())
    engine = prepare(
        plan, model, sgd, mean_of_valid, targets=lambda batch: batch[1].sum()
    )
    with engine:
        result = engine.step((x, valid))
        # 9 / 5; the mean of the means would be 3.
        assert float(result.loss) == pytest.approx(1.8)
        assert weight(engine) == pytest.approx(1.0 - 1.8)


def pp_11_batch_norm_is_warned_of_and_moves_once_a_micro_batch():
    plan = two_stages(("0", "1"), 1, micro_batch=2, accumulation=2)
    model = nn.Sequential(nn.BatchNorm1d(1), Scale())
    first = dist.get_rank() == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = prepare(plan, model, sgd, mean_of)
    said = [str(w.message) for w in caught if "micro-batch of 2" in str(w.message)]
    assert len(said) == first
    with engine:
        engine.step((torch.arange(1.0, 5.0)[:, None], torch.zeros(4)))
        state = engine.state_dict()
        if first:
            assert float(state["0.running_mean"]) == pytest.approx(0.485)
            assert int(state["0.num_batches_tracked"]) == 2


def hang_11_a_stage_without_parameters_takes_part_in_the_norm():
    plan = two_stages(("0", "1"), 1, micro_batch=2, accumulation=2)
    model = nn.Sequential(nn.Identity(), Scale())
    with prepare(plan, model, sgd, mean_of, clip_norm=1e9) as engine:
        result = engine.step((torch.arange(1.0, 5.0), torch.zeros(4)))
        assert float(result.grad_norm) == 2.5
