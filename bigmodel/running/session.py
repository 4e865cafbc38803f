"""Setting a process up to train: the public function `prepare`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.engine import (
    Job,
    LossFunction,
)
from bigmodel.backends.engines import build_engine
from bigmodel.running.engine import Engine as Engine
from bigmodel.running.engine import SchedulerFactory as SchedulerFactory
from bigmodel.running.engine import StepResult as StepResult
from bigmodel.running.engine import leave_group
from bigmodel.running.environment import choose_device, read_process
from bigmodel.running.horovod_start import start_horovod
from bigmodel.running.lookout import Lookout
from bigmodel.running.loss_shares import CountTargets, LossShares, target_counter
from bigmodel.running.memory_errors import memory_errors
from bigmodel.running.model_argument import (
    as_empty_model,
    as_model,
    copy_from_first_rank,
)
from bigmodel.running.optimizer_argument import as_factory
from bigmodel.running.plan_argument import as_plan
from bigmodel.running.random_state import seed_of_rank
from bigmodel.running.rendezvous import join


def prepare(
    plan: object,
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
    loss: LossFunction | None = None,
    *,
    clip_norm: float | None = None,
    scheduler: SchedulerFactory | None = None,
    targets: CountTargets | None = None,
    seed: int = 0,
    timeout: float = 600.0,
) -> Engine:
    """Set this process up to train a model by a plan; every rank calls it.

    Afterwards torch's random numbers are at `seed` plus a number of the rank's own (the
    data-parallel rank, on the first stage), so that dropout differs between the ranks,
    and the model is in training mode.

    Args:
        plan: A plan, the path of a plan file, or what `bigmodel.plan` returned.
        model: A module, or a function that makes one. All ranks get rank 0's weights.
            Under backend `fsdp2` the function makes real weights on rank 0 only, where
            it can be run on torch's `meta` device on the others.
        optimizer: A function from parameters to an optimizer, or a fresh optimizer over
            the model's parameters.
        loss: From the model's output and the batch to the mean loss, a scalar. None:
            the model's output holds it, as those of transformers do when the batch has
            labels. In a tuple batch the last element is the target and is not given to
            the model.
        clip_norm: Largest global norm of the gradients; None: no clipping, and no norm.
        scheduler: From the optimizer to a scheduler of torch, which steps once for
            every optimizer step, whatever the accumulation and the number of ranks.
        targets: From a micro-batch to the number of values that its mean loss is a mean
            over, such as its tokens; micro-batches then weigh by their counts. None:
            they weigh the same, but for models of transformers that compute their own
            loss, whose labels are counted.
        seed: For a model function and for what is random in training.
        timeout: Seconds after which a silent rank is an error.

    Raises:
        WorldError: The processes do not match the plan.
        WorkerError: A rank never came.
        UsageError: The plan, model or optimizer cannot be used together.
    """
    decided = as_plan(plan)
    process = read_process()
    device = choose_device(process)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    member = join(decided, process, device, timeout)
    lookout = Lookout(member)
    try:
        start_horovod(decided, process, member)
        fills = BACKENDS.get(decided.backend).fills_from_first_rank
        empty = fills and member.rank > 0
        module = (as_empty_model if empty else as_model)(model, seed)
        factory = as_factory(optimizer, module)
        module.train()
        torch.manual_seed(seed_of_rank(decided, member.rank, seed))
        job = Job(
            plan=decided,
            model=module,
            optimizer=factory,
            loss=loss,
            clip_norm=clip_norm,
            device=device,
        )
        with lookout.watch("prepare"), memory_errors(decided):
            if member.world > 1 and not fills:
                copy_from_first_rank(module, device)
            engine = build_engine(job)
        shares = LossShares(decided, device, target_counter(module, loss, targets))
    except BaseException:
        leave_group(member)
        raise
    return Engine(decided, engine, device, member, lookout, shares, scheduler)
