"""The public `Engine`: one plan, one model, one optimizer, on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from bigmodel.backends.batch import num_samples, split, to_device
from bigmodel.backends.engine import (
    AbstractEngine,
    Batch,
    LossShare,
)
from bigmodel.plans import Plan
from bigmodel.running.checkpoint_folder import CheckpointFolder
from bigmodel.running.checkpointing import read_checkpoint, write_checkpoint
from bigmodel.running.data_feeds import DataFeeds, Start
from bigmodel.running.environment import withdraw
from bigmodel.running.first_rank_work import run_first
from bigmodel.running.inference import inferring
from bigmodel.running.lookout import Lookout
from bigmodel.running.loss_shares import LossShares
from bigmodel.running.memory_errors import memory_errors
from bigmodel.running.own_loop import OwnLoop
from bigmodel.running.random_state import (
    random_state,
    restore_random_state,
    seed_anew,
)
from bigmodel.running.recompute_probe import probed
from bigmodel.running.rendezvous import Membership
from bigmodel.running.samples import DataPosition, Last
from bigmodel.running.window import Window, check_samples

SchedulerFactory = Callable[
    [torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler
]
"""From an optimizer to a scheduler over it."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    loss: Tensor
    """Mean loss over the global batch, on the device; `float(loss)` waits for it."""
    grad_norm: Tensor | None
    """Global norm of the gradients before clipping; None without clipping."""
    samples: int
    """Samples of the global batch; fewer than the plan's in a short window."""
    skipped: bool = False
    """Whether a gradient overflowed in float16, so that no rank stepped."""


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
        self._feeds = DataFeeds(plan, member.rank, device)
        self._probed = False
        self._calls = 0
        # Of `rank0_first`.
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

    def step(self, batch: Batch | Window | None = None) -> StepResult:
        """Train on one local batch: all its micro-batches and one optimizer step.

        Args:
            batch: The samples of this data-parallel rank: `plan.local_batch` of them.
                Or a `Window`, on all ranks: its micro-batches weigh by their samples,
                or by their targets where these are counted.
                None: only the optimizer's step, after `forward` and `backward` of all
                micro-batches.

        Raises:
            UsageError: The batch has another size.
            WorkerError: Another rank is silent; the message names it.
            OutOfMemoryError: The device's memory does not suffice.
        """
        where = f"step {self.steps + 1}"
        samples = self.plan.global_batch
        with self._lookout.watch(where), memory_errors(self.plan):
            if batch is None:
                loss = self._loop.close_window()
            else:
                micro, shares = self._weighed(batch)
                with nullcontext() if self._probed else probed(self.plan):
                    loss = self._engine.forward_backward(micro, shares)
                self._probed = True
                if isinstance(batch, Window):
                    samples = self._shares.samples(batch)
            update = self._engine.update()
            loss = self._shares.average(loss)
        if self._scheduler is not None and not update.skipped:
            self._scheduler.step()
        self.steps += 1
        return StepResult(
            loss=loss,
            grad_norm=update.grad_norm,
            samples=samples,
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
        with self._lookout.watch("forward"), memory_errors(self.plan):
            positional, named = to_device((positional, named), self.device)
            return self._loop.forward(*positional, **named)

    def backward(self, loss: Tensor, share: LossShare | None = None) -> None:
        """Add the gradients of one micro-batch.

        Args:
            loss: Its mean loss.
            share: What it weighs; None: 1 / accumulation.
        """
        with self._lookout.watch("backward"), memory_errors(self.plan):
            self._loop.backward(loss, share)

    def shares(self, micro_batches: Sequence[Batch]) -> list[LossShare]:
        """Return what `backward` is given for each micro-batch of a window.

        Counted by targets as `step` does it; all ranks call it together.
        """
        with self._lookout.watch("shares"):
            return self._shares.of(to_device(list(micro_batches), self.device))[1]

    @contextmanager
    def inference(self) -> Iterator[Callable[..., Any]]:
        """Yield the model for evaluation, to be called as often as a rank needs.

            with engine.inference() as model:
                while not done:
                    output = model(input_ids=ids)

        At the end, a rank that called it less often than others runs its last forward
        again until they are done, where weights are sharded; all ranks come here.

        Raises:
            UsageError: The plan has pipeline stages, or this rank ran no forward.
        """
        with self._lookout.watch("inference"), memory_errors(self.plan):
            whole = self._loop.whole("inference")
            with inferring(whole, self.plan, self.device) as model:
                yield model

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the mean loss over the local batches of all ranks, without training.

        Where targets are not counted, the batches must have equal sizes on all ranks
        for this to be the mean over samples.
        """
        with self._lookout.watch("evaluate"), memory_errors(self.plan):
            batch = to_device(batch, self.device)
            return self._shares.mean(self._engine.evaluate(batch), batch)

    def evaluate_all(self, source: Any) -> Tensor:
        """Return the mean loss over data that each sample counts once in.

        Ranks may have unequal shares of it: who has none left runs on what weighs
        nothing. The mean is over targets where these are counted, else over samples.

        Args:
            source: A dataset, which the ranks share; or an iterable of this rank's own
                micro-batches, of any sizes.
        """
        mean = torch.zeros((), device=self.device)
        count = torch.zeros((), device=self.device)
        with self._lookout.watch("evaluate_all"), memory_errors(self.plan):
            for batch in self._feeds.once(source):
                parts = batch.batches if isinstance(batch, Window) else [batch]
                run = batch.micro_batches[0] if isinstance(batch, Window) else batch
                loss = self._engine.evaluate(run).float()
                weight = self._shares.count(run) * len(parts)
                count = count + weight
                gain = torch.where(weight > 0, loss - mean, 0.0)
                mean = mean + gain * weight / count.clamp(min=1)
            return self._shares.total_mean(mean, count)

    def batches(
        self,
        source: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        start: Start = None,
        workers: int = 0,
        last: Last = "drop",
    ) -> Iterator[Batch | Window]:
        """Yield what `step` takes, on the device of this rank.

        Of a dataset: local batches, in an order that does not depend on the plan, so
        another plan with the same global batch sees the same ones. Of a DataLoader or
        another iterable: windows, of as many of its items as the plan accumulates; each
        item is a micro-batch of this rank, of any size. All ranks stop together.

        Args:
            source: A dataset, with a length and, by index, samples: tensors, numbers,
                or tuples or dicts of them. Or an iterable, which the user has divided
                among the data-parallel ranks.
            shuffle: Whether every epoch of a dataset has another order.
            seed: Of the order.
            epochs: How many times to go through the data; None: without end.
            start: Steps to leave out; a position, such as `engine.position` of another
                run; or the folder of a checkpoint, written under any plan. None: where
                a loaded checkpoint was, or else the beginning.
            workers: Processes that read a dataset ahead; 0: none.
            last: At the end of an epoch, `drop` what fills no global batch, or make a
                `short` step of it: a `Window`, whose loss is the mean over it.

        Raises:
            UsageError: The dataset is smaller than a global batch, or is not the one
                that the loaded checkpoint stopped in.
        """
        return self._feeds.training(
            source,
            shuffle=shuffle,
            seed=seed,
            epochs=epochs,
            start=start,
            workers=workers,
            last=last,
        )

    @property
    def position(self) -> DataPosition | None:
        """Where the run is in its dataset, for `batches(start=)` under any plan."""
        return self._feeds.position

    def steps_per_epoch(self, source: Any, *, last: Last = "drop") -> int:
        """Return how many steps `batches` makes of one epoch of a source.

        For a stream, which must have a length on every rank, all ranks call it.
        """
        return self._feeds.steps_per_epoch(source, last)

    def rank0_first(
        self, work: Callable[[], Result], *, timeout: float = 86400.0
    ) -> Result:
        """Run long work, such as tokenising, on rank 0 and then on the others.

        Args:
            work: Does it once and leaves the result where the others find it.
            timeout: Seconds that the others wait, whatever that of collectives is.

        Raises:
            WorkerError: Rank 0 failed, or was not done in time.
        """
        self._calls += 1
        return run_first(self._member, f"first/{self._calls}", work, timeout)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's weights on rank 0, and an empty dict elsewhere.

        The names are those of the model in one process; tensors are on the CPU.
        """
        with self._lookout.watch("state_dict", meet=True):
            return self._engine.model_state()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder, which a run under any plan can load.

        The plan file in it is written last: a folder without one is no checkpoint.
        """
        with self._lookout.watch("save", meet=True):
            own = {
                "random": random_state(self.device),
                "scheduler": self._scheduler and self._scheduler.state_dict(),
                "stream": self._feeds.state(),
            }
            position = self._feeds.position
            progress = {"steps": self.steps, "data": position and position.to_json()}
            write_checkpoint(
                CheckpointFolder(path), self.plan, self._engine, own, progress
            )

    def load(self, path: str | Path) -> None:
        """Read a checkpoint that `save` wrote, of the same model and optimizer.

        The plan may be another one, with other ranks, backend or precision. Ranks that
        the checkpoint does not know begin with random numbers of their own. Beside
        a plan of the same ranks and micro-batches, a stream is begun by `start=`.

        Raises:
            UsageError: The folder is no checkpoint, or is of another model or
                optimizer; or one of the two plans has backend `deepspeed_pipeline`.
        """
        folder = CheckpointFolder(path)
        with self._lookout.watch("load", meet=True):
            progress, own = read_checkpoint(folder, self.plan, self._engine)
        self.steps = progress["steps"]
        self._feeds.restore(progress.get("data"), own.get("stream"))
        if self._scheduler is not None and own.get("scheduler"):
            self._scheduler.load_state_dict(own["scheduler"])
        if "random" in own:
            restore_random_state(own["random"], self.device)
        else:
            seed_anew(self.steps)

    def close(self) -> None:
        """Leave the job: destroy the process group if `prepare` made it.

        Nothing but `plan`, `rank` and `steps` can be asked of the engine afterwards.
        """
        # Before the group: when the last reference to a group of gloo is that of a DDP
        # reducer, its destructor joins a thread that waits for Python's lock, for ever.
        self._lookout.leave()
        for name in ("_engine", "_loop", "_scheduler"):
            self.__dict__.pop(name, None)
        gc.collect()
        leave_group(self._member)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _weighed(self, batch: Batch | Window) -> tuple[list[Batch], list[LossShare]]:
        """Return the micro-batches to run, on the device, and what each weighs."""
        if isinstance(batch, Window):
            parts = [to_device(part, self.device) for part in batch.micro_batches]
            check_samples(len(parts), self.plan.accumulation, "micro-batches")
            return self._shares.of(parts, batch.real)
        check_samples(num_samples(batch), self.plan.local_batch, "samples")
        parts = split(to_device(batch, self.device), self.plan.accumulation)
        return self._shares.of(parts)


def leave_group(member: Membership) -> None:
    """Destroy the process group, if it was made for this engine."""
    if member.owns_group and dist.is_initialized():
        dist.destroy_process_group()
    withdraw(member.published)
