"""The public `Engine`: one plan, one model, one optimizer, on all ranks."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigmodel.backends.batch import num_samples, split, to_device
from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.engine import (
    AbstractEngine,
    Batch,
    Job,
    LossFunction,
    LossShare,
)
from bigmodel.backends.engines import build_engine
from bigmodel.errors import OutOfMemoryError, UsageError, Violation
from bigmodel.plans import Plan, document
from bigmodel.running.environment import choose_device, read_process
from bigmodel.running.horovod_start import start_horovod
from bigmodel.running.lookout import Lookout
from bigmodel.running.loss_shares import CountTargets, LossShares, target_counter
from bigmodel.running.model_argument import (
    as_empty_model,
    as_model,
    copy_from_first_rank,
)
from bigmodel.running.optimizer_argument import as_factory
from bigmodel.running.own_loop import OwnLoop
from bigmodel.running.plan_argument import as_plan
from bigmodel.running.rendezvous import Membership, join
from bigmodel.running.samples import RankBatches, batches

SchedulerFactory = Callable[
    [torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler
]
"""From an optimizer to a scheduler over it."""

_PLAN_FILE = "plan.json"
_PROGRESS_FILE = "progress.json"
_STATE_FOLDER = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    loss: Tensor
    """Mean loss over the global batch, on the device; `float(loss)` waits for it."""
    grad_norm: Tensor | None
    """Global norm of the gradients before clipping; None without clipping."""
    samples: int
    """Samples of the global batch."""
    skipped: bool = False
    """Whether a gradient overflowed in float16, so that no rank stepped."""


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

    Afterwards torch's random numbers are at `seed` plus the data-parallel rank, so that
    dropout differs between the ranks, and the model is in training mode.

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
        torch.manual_seed(seed + decided.mesh.data_rank(member.rank))
        job = Job(
            plan=decided,
            model=module,
            optimizer=factory,
            loss=loss,
            clip_norm=clip_norm,
            device=device,
        )
        with lookout.watch("prepare"), _memory_errors(decided):
            if member.world > 1 and not fills:
                copy_from_first_rank(module, device)
            engine = build_engine(job)
        shares = LossShares(decided, device, target_counter(module, loss, targets))
    except BaseException:
        _leave(member)
        raise
    return Engine(decided, engine, device, member, lookout, shares, scheduler)


@final
class Engine:
    """Trains by the plan. Every method but `batches` is called on all ranks together.

    Made by `prepare`; a context manager that leaves the process group at its end.
    """

    def __init__(
        self,
        plan: Plan,
        engine: AbstractEngine,
        device: torch.device,
        member: Membership,
        lookout: Lookout,
        shares: LossShares,
        scheduler: SchedulerFactory | None,
    ) -> None:
        self.plan = plan
        """The plan that is obeyed."""
        self.device = device
        """Where this rank computes."""
        self.steps = 0
        """Optimizer steps done, those before a loaded checkpoint included."""
        self._engine = engine
        self._member = member
        self._lookout = lookout
        self._shares = shares
        self._loop = OwnLoop(plan, engine, device)
        self._scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        if scheduler is not None and engine.optimizer is not None:
            self._scheduler = scheduler(engine.optimizer)

    @property
    def rank(self) -> int:
        """Index of this process in the job."""
        return self._member.rank

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self._member.rank == 0

    def step(self, batch: Batch | None = None) -> StepResult:
        """Train on one local batch: all its micro-batches and one optimizer step.

        Args:
            batch: The samples of this data-parallel rank: `plan.local_batch` of them.
                None: only the optimizer's step, after `forward` and `backward` of all
                micro-batches.

        Raises:
            UsageError: The batch has another size.
            WorkerError: Another rank is silent; the message names it.
            OutOfMemoryError: The device's memory does not suffice.
        """
        where = f"step {self.steps + 1}"
        with self._lookout.watch(where), _memory_errors(self.plan):
            if batch is None:
                loss = self._loop.close_window()
            else:
                self._check_size(batch)
                micro = split(to_device(batch, self.device), self.plan.accumulation)
                loss = self._engine.forward_backward(micro, self._shares.of(micro))
            update = self._engine.update()
            loss = self._shares.average(loss)
        if self._scheduler is not None and not update.skipped:
            self._scheduler.step()
        self.steps += 1
        return StepResult(
            loss=loss,
            grad_norm=update.grad_norm,
            samples=self.plan.global_batch,
            skipped=update.skipped,
        )

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Return the model's output for one micro-batch, in a loop of your own.

            for micro_batch in micro_batches:      # plan.accumulation of them
                output = engine.forward(**micro_batch)
                engine.backward(output.loss)
            engine.step()

        Raises:
            UsageError: The plan has pipeline stages, or the window is full.
        """
        with self._lookout.watch("forward"), _memory_errors(self.plan):
            positional, named = to_device((positional, named), self.device)
            return self._loop.forward(*positional, **named)

    def backward(self, loss: Tensor, share: LossShare | None = None) -> None:
        """Add the gradients of one micro-batch.

        Args:
            loss: Its mean loss.
            share: What it weighs; None: 1 / accumulation.
        """
        with self._lookout.watch("backward"), _memory_errors(self.plan):
            self._loop.backward(loss, share)

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the mean loss over the local batches of all ranks, without training.

        Where targets are not counted, the batches must have equal sizes on all ranks
        for this to be the mean over samples.
        """
        with self._lookout.watch("evaluate"), _memory_errors(self.plan):
            batch = to_device(batch, self.device)
            return self._shares.mean(self._engine.evaluate(batch), batch)

    def batches(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        start: int = 0,
        workers: int = 0,
    ) -> Iterator[Batch]:
        """Yield the local batches of this rank, on its device.

        The order of the samples does not depend on the plan, so another plan with the
        same global batch sees the same batches. The last incomplete global batch of
        every epoch is left out.

        Args:
            dataset: Has a length and, by index, samples: tensors, numbers, or tuples or
                dicts of them.
            shuffle: Whether every epoch has another order.
            seed: Of the order.
            epochs: How many times to go through the data; None: without end.
            start: Global batches to leave out; `engine.steps` after loading a
                checkpoint.
            workers: Processes that read ahead; 0: none.

        Raises:
            UsageError: The dataset is smaller than a global batch.
        """
        sampler = RankBatches(
            len(dataset),
            self.plan,
            self.rank,
            shuffle=shuffle,
            seed=seed,
            epochs=epochs,
            start=start,
        )
        return batches(dataset, sampler, self.device, workers)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's weights on rank 0, and an empty dict elsewhere.

        The names are those of the model in one process; tensors are on the CPU.
        """
        with self._lookout.watch("state_dict"):
            return self._engine.model_state()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder, to be loaded under the same plan.

        The plan file in it is written last: a folder without one is no checkpoint.
        """
        folder = Path(path)
        with self._lookout.watch("save"):
            if self.is_first:
                (folder / _STATE_FOLDER).mkdir(parents=True, exist_ok=True)
                (folder / _PLAN_FILE).unlink(missing_ok=True)
            dist.barrier()
            self._engine.save(str(folder / _STATE_FOLDER))
            dist.barrier()
            if self.is_first:
                progress = json.dumps({"steps": self.steps})
                (folder / _PROGRESS_FILE).write_text(progress + "\n")
                document.save(self.plan, folder / _PLAN_FILE)
            dist.barrier()

    def load(self, path: str | Path) -> None:
        """Read a checkpoint that `save` wrote under the same plan.

        Raises:
            UsageError: The folder is no checkpoint, or was written under another plan.
        """
        folder = Path(path)
        if not (folder / _PLAN_FILE).is_file():
            raise UsageError(
                f"{str(folder)!r} is no complete checkpoint: it has no {_PLAN_FILE}, "
                "which is written last"
            )
        written = document.load(folder / _PLAN_FILE)
        if document.digest(written) != document.digest(self.plan):
            raise UsageError(
                f"the checkpoint {str(folder)!r} was written under another plan: "
                f"{written.describe()}; this run's plan is {self.plan.describe()}; "
                f"run with --plan {folder / _PLAN_FILE}"
            )
        with self._lookout.watch("load"):
            self._engine.load(str(folder / _STATE_FOLDER))
        self.steps = json.loads((folder / _PROGRESS_FILE).read_text())["steps"]

    def close(self) -> None:
        """Leave the job: destroy the process group if `prepare` made it.

        Nothing but `plan`, `rank` and `steps` can be asked of the engine afterwards.
        """
        # Before the group: when the last reference to a group of gloo is that of a DDP
        # reducer, its destructor joins a thread that waits for Python's lock, for ever.
        for name in ("_engine", "_loop", "_scheduler"):
            self.__dict__.pop(name, None)
        gc.collect()
        _leave(self._member)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_size(self, batch: Batch) -> None:
        count, plan = num_samples(batch), self.plan
        if count != plan.local_batch:
            raise UsageError(
                Violation(
                    field="samples in the batch",
                    got=count,
                    rule=f"every data-parallel rank gives {plan.local_batch} a step "
                    f"(micro-batch {plan.micro_batch} x accumulation "
                    f"{plan.accumulation})",
                    cure="take the batches from engine.batches(dataset)",
                )
            )


@contextmanager
def _memory_errors(plan: Plan) -> Iterator[None]:
    """Say what to do when the device's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the device's memory does not suffice for: {plan.describe()}; use a "
            "smaller micro-batch, recompute activations, or plan again with more "
            f"memory to spare ({error})"
        ) from error


def _leave(member: Membership) -> None:
    if member.owns_group and dist.is_initialized():
        dist.destroy_process_group()
