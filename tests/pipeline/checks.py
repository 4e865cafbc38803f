"""What is checked with two real stages; every function runs on both ranks.

All run in one launch. A check returns nothing when all is well and raises otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from bigmodel.backends.batch import split
from bigmodel.backends.engine import Job
from bigmodel.backends.pipeline.engine import build
from bigmodel.errors import UsageError
from bigmodel.plans import Mesh, Plan, Stages
from tests.pipeline.families import (
    FAMILIES,
    REFUSED,
    make,
    make_batch,
    make_family,
)


def equal(parts):
    return [1 / len(parts)] * len(parts)


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-6)


def squared(output, batch):
    return nn.functional.mse_loss(output, batch[-1])


def job_for(model: nn.Module, units: tuple[str, ...], **changes) -> Job:
    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2),
        micro_batch=2,
        accumulation=4,
        units=units,
        stages=Stages(schedule="1f1b", cuts=(len(units) // 2,)),
    )
    return Job(
        plan=replace(plan, **changes),
        model=model,
        optimizer=adamw,
        loss=squared if isinstance(model, nn.Sequential) else None,
        clip_norm=0.1,
        device=torch.device("cpu"),
    )


def chain(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = middle or (nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 8), nn.Linear(8, 3))


def points(samples: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, 6, generator=generator),
        torch.randn(samples, 3, generator=generator),
    )


def family(name: str) -> None:
    """Three steps give the losses, norms, evaluation and weights of one process."""
    alone = make_family(name)
    optimizer = adamw(alone.parameters())
    engine = build(job_for(make_family(name), FAMILIES[name].units))
    for step in range(3):
        parts = split(make_batch(name, 8, step), 4)
        expected = 0.0
        for part in parts:
            loss = alone(**part).loss / len(parts)
            loss.backward()
            expected += loss.item()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        close(engine.forward_backward(parts, equal(parts)), expected)
        close(engine.update().grad_norm, norm)
    parts = split(make_batch(name, 6, 9), 3)
    with torch.no_grad():
        alone.eval()
        expected = sum(alone(**part).loss.item() for part in parts) / 3
    close(engine.evaluate(make_batch(name, 6, 9)), expected)
    state = engine.model_state()
    if torch.distributed.get_rank():
        same(state, {})
        return
    same(list(state), list(alone.state_dict()))
    for key, value in alone.state_dict().items():
        close(state[key], value)


def frozen_first_stage() -> None:
    """A stage with nothing to train has no optimizer, and the other one trains on."""
    model = chain()
    for child in list(model)[:2]:
        child.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = build(job_for(model, ("0", "1", "2", "3", "4")))
    for step in range(3):
        engine.forward_backward(split(points(8, step), 4), equal(range(4)))
        engine.update()
    state = engine.model_state()
    if torch.distributed.get_rank() == 0:
        changed = [key for key in state if not torch.equal(state[key], before[key])]
        same(changed, ["3.weight", "3.bias", "4.weight", "4.bias"])


def statistics_of_batches() -> None:
    """Finding out the shapes moves no statistics of BatchNorm."""
    alone = chain(nn.BatchNorm1d(8), nn.Tanh())
    engine = build(job_for(chain(nn.BatchNorm1d(8), nn.Tanh()), ("0", "2", "3", "4")))
    parts = split(points(8, 0), 4)
    for part in parts:
        alone(part[0])
    engine.forward_backward(parts, equal(parts))
    state = engine.model_state()
    if torch.distributed.get_rank() == 0:
        close(state["1.running_mean"], alone[1].running_mean)
        same(int(state["1.num_batches_tracked"]), 4)


def another_length() -> None:
    """From step to step the shape may change; within one step it may not."""
    engine = build(job_for(make_family("llama"), FAMILIES["llama"].units))
    batch = make_batch("llama", 8, 0)
    shorter = {key: value[:, :5].contiguous() for key, value in batch.items()}
    alone = make_family("llama")
    for parts in (split(batch, 4), split(shorter, 4), split(batch, 4)):
        expected = sum(alone(**part).loss.item() for part in parts) / 4
        close(engine.forward_backward(parts, equal(parts)), expected)
    mixed = [*split(batch, 4)[:3], split(shorter, 4)[0]]
    refused("of one shape", lambda: engine.forward_backward(mixed, equal(mixed)))


class Chat(nn.Module):
    """A user's own model: several inputs, weights of its own, a block with two."""

    def __init__(self, *, reuses_embedding: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.shift = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(Gate() for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.reuses_embedding = reuses_embedding

    def forward(self, ids, weights, *, scale=None):
        hidden = self.embed(ids) + self.shift
        for block in self.blocks:
            hidden, _ = block(hidden, gate=weights[..., None] * scale)
        hidden = self.norm(hidden)
        if self.reuses_embedding:
            return hidden @ self.embed.weight.T
        return self.head(hidden)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden, *, gate):
        return hidden + gate * torch.tanh(self.layer(hidden)), None


def chats(samples: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (samples, 5), generator=generator)
    weights = torch.rand(samples, 5, generator=generator)
    scale = torch.rand(samples, 5, 1, generator=generator)
    return {"ids": ids, "weights": weights, "scale": scale}


def next_token(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


UNITS = tuple(f"blocks.{index}" for index in range(4))


def several_inputs() -> None:
    """A user's module is cut too, whatever its forward takes."""
    alone = Chat()
    optimizer = adamw(alone.parameters())
    engine = build(replace(job_for(Chat(), UNITS), loss=next_token, clip_norm=None))
    for step in range(3):
        batch = chats(8, step)
        loss = next_token(alone(**batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        parts = split(batch, 4)
        close(engine.forward_backward(parts, equal(parts)), loss.detach())
        engine.update()
    state = engine.model_state()
    if torch.distributed.get_rank() == 0:
        same(list(state), list(alone.state_dict()))
        for key, value in alone.state_dict().items():
            close(state[key], value)


def what_is_used_twice() -> None:
    """What a stage would need of another one is found out, on every rank."""
    job = job_for(Chat(reuses_embedding=True), UNITS)
    engine = build(replace(job, loss=next_token))
    parts = split(chats(8, 0), 4)
    refused(
        "uses embed.weight, which another stage has",
        lambda: engine.forward_backward(parts, equal(parts)),
    )


def several_hidden_states() -> None:
    """So are blocks that hand each other more than a stage hands on."""
    units = REFUSED.units
    engine = build(
        job_for(make(REFUSED), units, stages=Stages(schedule="1f1b", cuts=(1,)))
    )
    parts = split(make_batch("t5", 8, 0), 4)
    refused(
        "hand each other 2 tensors",
        lambda: engine.forward_backward(parts, equal(parts)),
    )


def encoder_output_in_the_decoder() -> None:
    """A decoder reads the encoder in every block, so no cut goes through it."""
    units = FAMILIES["bart"].units
    stages = Stages(schedule="1f1b", cuts=(3,))
    engine = build(job_for(make_family("bart"), units, stages=stages))
    parts = split(make_batch("bart", 8, 0), 4)
    refused(
        "cannot be cut there",
        lambda: engine.forward_backward(parts, equal(parts)),
    )


CHECKS: dict[str, Callable[[], None]] = {
    **{name: lambda name=name: family(name) for name in FAMILIES},
    "frozen first stage": frozen_first_stage,
    "statistics of batches": statistics_of_batches,
    "another length": another_length,
    "several inputs": several_inputs,
    "what is used twice": what_is_used_twice,
    "several hidden states": several_hidden_states,
    "encoder output in the decoder": encoder_output_in_the_decoder,
}


def close(got, expected) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float32),
        torch.as_tensor(expected, dtype=torch.float32),
        rtol=1e-5,
        atol=1e-5,
    )


def same(got, expected) -> None:
    if got != expected:
        raise AssertionError(f"{got} is not {expected}")


def refused(text: str, action: Callable[[], object]) -> None:
    try:
        action()
    except UsageError as error:
        if text not in str(error):
            raise AssertionError(f"{text!r} is not in {error}") from error
        return
    raise AssertionError(f"not refused: {text}")
