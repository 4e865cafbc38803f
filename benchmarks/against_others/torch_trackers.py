"""torch's own trackers: `MemTracker` for DDP, `FSDPMemTracker` for FSDP2.

Source: `torch/distributed/_tools/mem_tracker.py` and `fsdp2_mem_tracker.py`, private
and used as their docstrings show: the model, its optimizer and the batch are registered
and a step is run within the tracker, twice with `reset_mod_stats` between, because the
first step makes the optimizer's states. They count what passes through Python's
dispatch: not what C++ allocates past it, such as copies of gloo.

There are two ways to use them, and both are shown:

* on fake tensors, which need no memory, as a prediction. DDP's reducer reads values and
  does not run on them, so its buckets are not there; a plain AdamW reads its step
  count, so the fused one stands in, which has no temporaries;
* as a real step, which needs all the memory that is asked for: DDP in a gloo group of
  one process, FSDP2 in a fake group that sends nothing. This is a measurement.

The first step that fake tensors ever take in a process can keep storages longer than
later ones (torch 2.13: +140 % for the MLP under FSDP2). Every tool is asked twice and
the second answer counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from benchmarks.against_others.estimator import Answer, Estimator, Prediction, Reason
from benchmarks.against_others.training_step import (
    CPU,
    Subject,
    Training,
    replicated,
    sharded,
)
from benchmarks.memory_accuracy.cases import MODELS, Case

_STEPS = 2


def replicated_bytes(subject: Subject, *, fake: bool) -> int:
    """Return the peak that `MemTracker` sees of a DDP plan, in bytes.

    Args:
        subject: What is trained.
        fake: On fake tensors and without DDP, or really and with it.
    """
    group = nullcontext() if fake else _group("gloo", dist.HashStore(), 1)
    with group, FakeTensorMode() if fake else nullcontext():
        return _watch_replicated(replicated(subject, wrapped=not fake, fused=fake))


def sharded_bytes(subject: Subject, *, fake: bool) -> int:
    """Return the peak that `FSDPMemTracker` sees of an FSDP2 plan, in bytes.

    Args:
        subject: What is trained.
        fake: On fake tensors, or really.
    """
    ranks = subject.plan.mesh.shard
    with _group("fake", FakeStore(), ranks):
        # Its ranks are read as numbers, which fake tensors do not have.
        mesh = init_device_mesh(CPU.type, (ranks,))
        with FakeTensorMode() if fake else nullcontext():
            return _watch_sharded(sharded(subject, mesh, fused=fake))


def _watch_replicated(training: Training) -> int:
    tracker = MemTracker()
    masters = training.updater.params.values()
    tracker.track_external(
        training.called, training.optimizer, *masters, *tree_leaves(training.batch)
    )
    return _peak(tracker, training)


def _watch_sharded(training: Training) -> int:
    tracker = FSDPMemTracker(training.module, training.optimizer)
    tracker.track_inputs((training.batch,))
    return _peak(tracker, training)


def _peak(tracker: MemTracker, training: Training) -> int:
    with tracker:
        for _ in range(_STEPS):
            training.step()
            tracker.reset_mod_stats()
    return tracker.get_tracker_snapshot("peak")[CPU]["Total"]


@contextmanager
def _group(backend: str, store: dist.Store, size: int) -> Iterator[None]:
    dist.init_process_group(backend, store=store, rank=0, world_size=size)
    try:
        yield
    finally:
        # A DDP object that outlives its group can hang in its destructor.
        gc.collect()
        dist.destroy_process_group()


def estimate(case: Case, *, fake: bool) -> Answer:
    make, batch, loss = MODELS[case.model]
    subject = Subject(plan=case.plan, make=make, batch=batch, loss=loss)
    if case.plan.backend == "ddp":
        return Prediction(
            allocated=replicated_bytes(subject, fake=fake),
            outside="no DDP on fake tensors" if fake else "",
        )
    if case.plan.backend == "fsdp2":
        return Prediction(allocated=sharded_bytes(subject, fake=fake))
    return Reason(text="no tracker for DeepSpeed")


TORCH_FAKE = Estimator(
    name="torch fake",
    counts="MemTracker, FSDPMemTracker on fake tensors; no DDP buckets, fused AdamW",
    estimate=partial(estimate, fake=True),
)
TORCH_REAL = Estimator(
    name="torch real",
    counts="the same around a real step: a measurement, which needs the memory",
    estimate=partial(estimate, fake=False),
)
