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


def changed_hidden_states() -> None:
    """A model that cannot be cut is found out in the first run, on every rank."""
    engine = build(job_for(make(REFUSED), REFUSED.units))
    batch = make_batch("granite", 8, 0)
    refused(
        "before its blocks",
        lambda: engine.forward_backward(split(batch, 4), equal(range(4))),
    )


CHECKS: dict[str, Callable[[], None]] = {
    **{name: lambda name=name: family(name) for name in FAMILIES},
    "frozen first stage": frozen_first_stage,
    "statistics of batches": statistics_of_batches,
    "another length": another_length,
    "changed hidden states": changed_hidden_states,
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
