"""Faults of pipelines, on two stages of DeepSpeed's pipeline engine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.errors import UsageError
from bigmodel.plans import DeepSpeedOptions, Mesh, Plan, Stages
from bigmodel.running.session import prepare

VOCABULARY = 16


class Head(nn.Linear):
    """A head with a bias, which is not tied."""


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, 8), Head(8, VOCABULARY)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), head)


def sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def cross_entropy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), batch[1].flatten())


def count(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def tokens(samples: int, length: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples + length)
    ids = torch.randint(VOCABULARY, (samples, length), generator=generator)
    return ids, ids.roll(1, dims=1)


def two_stages(zero_stage: int, **fields) -> Plan:
    return Plan(
        backend="deepspeed_pipeline",
        mesh=Mesh(pipeline=2),
        units=("0", "1", "2", "3", "4"),
        stages=Stages(schedule="1f1b", cuts=(2,)),
        zero_stage=zero_stage,
        accumulation=2,
        deepspeed=DeepSpeedOptions(bucket_elements=100)
        if zero_stage
        else DeepSpeedOptions(),
        **fields,
    )


def follow(plan: Plan, batches, tolerance: float, clip_norm: float | None) -> None:
    """Compare losses, norms and weights with one process."""
    alone, stepped = tied(), 0
    with prepare(
        plan, tied(), sgd, cross_entropy, clip_norm=clip_norm, targets=count
    ) as engine:
        for batch in batches:
            loss = cross_entropy(alone(batch[0]), batch)
            result = engine.step(batch)
            close(result.loss, loss.detach(), tolerance)
            if result.skipped:
                # float16: the scale of the loss is still on its way down.
                continue
            stepped += 1
            loss.backward()
            if clip_norm is not None:
                norm = nn.utils.clip_grad_norm_(alone.parameters(), clip_norm)
                close(result.grad_norm, norm, tolerance)
            with torch.no_grad():
                for parameter in alone.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.5 * parameter.grad
                    parameter.grad = None
        assert stepped > 1
        odd = tokens(3, batches[-1][0].shape[1])
        with torch.no_grad():
            expected = cross_entropy(alone(odd[0]), odd)
        close(engine.evaluate(odd), expected, tolerance)
        state = engine.state_dict()
        if dist.get_rank() == 0:
            assert list(state) == list(alone.state_dict())
            for name, value in alone.state_dict().items():
                close(state[name], value, tolerance)
        held = engine._engine._held  # type: ignore[attr-defined]
        shared = dict(held)["0" if dist.get_rank() == 0 else "4"].weight.detach()
        copies = [torch.empty_like(shared) for _ in range(2)]
        dist.all_gather(copies, shared)
        assert torch.equal(*copies)


def close(got, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        got.to(expected.dtype), expected, rtol=tolerance, atol=tolerance
    )


def pp_05_tied_weights_of_two_stages_stay_equal_and_count_once():
    # The bias of the head lies beside the copy, and counts.
    for zero_stage in (0, 1):
        plan = two_stages(zero_stage, micro_batch=2)
        follow(plan, [tokens(4)] * 3, 1e-5, clip_norm=0.1)


def pp_03_the_sequence_length_may_change_from_step_to_step():
    batches = [tokens(4, length) for length in (3, 7, 5)]
    follow(two_stages(0, micro_batch=2), batches, 1e-5, clip_norm=None)


def pp_08_zero_1_goes_with_every_precision():
    for precision in ("bf16", "fp16", "autocast"):
        plan = two_stages(1, micro_batch=2, precision=precision)
        follow(plan, [tokens(4)] * 8, 3e-2, clip_norm=0.1)


def ga_01_losses_weigh_as_many_tokens_as_they_are_means_of():
    ids, labels = tokens(4)
    labels = labels.clone()
    labels[:2, 1:] = -100
    follow(two_stages(0, micro_batch=2), [(ids, labels)] * 2, 1e-5, clip_norm=0.1)


def hang_11_a_stage_that_trains_nothing_is_refused_on_every_rank():
    model = tied()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    with pytest.raises(UsageError, match="something to train in every stage"):
        prepare(two_stages(0, micro_batch=2), model, sgd, cross_entropy)
