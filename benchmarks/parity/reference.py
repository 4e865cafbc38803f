"""The measure of right: a plain loop in one process, without this library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.parity.cases import STEPS, Case
from benchmarks.parity.models import SUBJECTS, make_model, make_optimizer


@dataclass(frozen=True)
class Outcome:
    """What one process gets."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    weights: dict[str, Tensor]


def optimizer_over(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, as users build them."""
    params = [value for value in model.parameters() if value.requires_grad]
    return make_optimizer(
        [
            {"params": [value for value in params if value.dim() > 1]},
            {
                "params": [value for value in params if value.dim() < 2],
                "weight_decay": 0.0,
                "lr": 2e-3,
            },
        ]
    )


def sample_batch(case: Case) -> Callable[[int, int, int], object]:
    """Return `take(step, begin, end)`: samples of one step's global batch."""
    size = case.plan.global_batch
    data = SUBJECTS[case.model].data(size * STEPS)

    def take(step: int, begin: int, end: int) -> object:
        window = slice(step * size + begin, step * size + end)
        if isinstance(data, dict):
            return {key: value[window] for key, value in data.items()}
        return tuple(value[window] for value in data)

    return take


def run_alone(case: Case) -> Outcome:
    """Return what one process gets with the same global batches."""
    # The labels of micro-batches have equal lengths, so one mean over the global batch
    # is the mean of their means.
    return _run(
        case.model, case.freeze, case.clip_norm, case.groups, case.plan.global_batch
    )(case)


@cache
def _run(
    model_name: str, freeze: bool, clip_norm: float | None, instance: bool, size: int
) -> Callable[[Case], Outcome]:
    results: list[Outcome] = []

    def run(case: Case) -> Outcome:
        if not results:
            results.append(_train(case))
        return results[0]

    return run


def _train(case: Case) -> Outcome:
    model = make_model(case.model, freeze=case.freeze)
    model.train()
    params = [value for value in model.parameters() if value.requires_grad]
    optimizer = optimizer_over(model) if case.groups else make_optimizer(params)
    take = sample_batch(case)
    losses, norms = [], []
    for step in range(STEPS):
        loss = _loss(case, model, take(step, 0, case.plan.global_batch))
        loss.backward()
        losses.append(loss.item())
        if case.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(params, case.clip_norm)
            norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        last = take(0, 0, case.plan.global_batch)
        evaluation = _loss(case, model.eval(), last).item()
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return Outcome(losses, norms, evaluation, weights)


def _loss(case: Case, model: torch.nn.Module, batch) -> Tensor:
    if case.model == "gpt2":
        return model(**batch).loss
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
