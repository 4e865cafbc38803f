"""Which models can be cut into stages, and cutting them."""

from __future__ import annotations

import torch
from torch import nn

from bigmodel.backends.engine import Job
from bigmodel.backends.pipeline.cut import AbstractCut
from bigmodel.backends.pipeline.sequential import (
    SequentialCut,
    is_sequential,
    sequential_violations,
)
from bigmodel.backends.pipeline.whole_forward import (
    WholeForwardCut,
    whole_forward_violations,
)
from bigmodel.errors import UsageError, raise_if_any
from bigmodel.plans import Mesh, Plan, Stages


def check_model(job: Job) -> None:
    """Refuse a model that cannot be cut into the plan's stages.

    Raises:
        UsageError: Says what can be cut and what to do instead.
    """
    if is_sequential(job.model):
        raise_if_any(sequential_violations(job))
    else:
        raise_if_any(list(whole_forward_violations(job)))


def cut_model(job: Job, stage: int) -> AbstractCut:
    """Cut the job's model down to a stage, in place; the rest is freed."""
    check_model(job)
    if is_sequential(job.model):
        return SequentialCut(job, stage)
    return WholeForwardCut(job, stage)


def why_uncuttable(model: nn.Module, units: tuple[str, ...]) -> str:
    """Return why a model cannot be cut into stages, or an empty string when it can."""
    if len(units) < 2:
        return f"it has {len(units)} blocks, and a stage needs at least one"
    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2),
        units=units,
        stages=Stages(schedule="gpipe", cuts=(len(units) // 2,)),
    )
    job = Job(
        plan=plan,
        model=model,
        optimizer=torch.optim.SGD,
        loss=None,
        clip_norm=None,
        device=torch.device("cpu"),
    )
    try:
        check_model(job)
    except UsageError as error:
        return "; ".join(v.rule for v in error.violations) or str(error)
    return ""
