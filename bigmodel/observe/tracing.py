"""Reading a model: one forward and backward on fake tensors for every micro-batch size.

[Note: Three micro-batches]
Every size on the tapes is an affine function of the micro-batch. Runs with 2 and 3
samples give the function and one with 4 checks it. One sample is not used: a first
dimension of 1 lets some copies be views.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from bigmodel.errors import BigModelError, TracingError
from bigmodel.models import INPUTS_KEPT, ModelSpec
from bigmodel.observe.assembly import LawError, assemble
from bigmodel.observe.blocks import find_blocks
from bigmodel.observe.boundaries import NotSkippableError, UnitBoundaries
from bigmodel.observe.cut_points import HandedOver, find_cut_points
from bigmodel.observe.fake_model import fake_batch, fake_module
from bigmodel.observe.huggingface import real_paths
from bigmodel.observe.kept_linear_inputs import inputs_kept
from bigmodel.observe.layout import Layout
from bigmodel.observe.repetition import find_rows, without_repetition
from bigmodel.observe.sample import describe_sample
from bigmodel.observe.split_backward import POLICY as SPLIT
from bigmodel.observe.split_backward import (
    GraphStart,
    parameter_units,
    run_split_backward,
)
from bigmodel.observe.storages import StepRecord, StorageFollower
from bigmodel.observe.target import Target, TargetOperators
from bigmodel.observe.workspaces import Workspaces
from bigmodel.plans import NUMBER_FORMATS

_NOT_THE_USERS = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
)
"""Folders whose code is not where a fault is to be mended."""

SIZES = (2, 3, 4)
"""Micro-batches that are run; see [Note: Three micro-batches]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read a model."""

    loss_of: Callable[[nn.Module, Any], torch.Tensor]
    """Runs the model on a batch and returns the loss."""
    recompute: Mapping[str, Callable[[nn.Module], None]]
    """By policy, makes a block recompute as the engines do."""
    precision: str
    target: Target
    name: str
    uncuttable: Callable[[nn.Module, tuple[str, ...]], str] = lambda model, units: ""
    """Says why the model, with these units, cannot be cut into stages."""
    own_loss: bool = False
    """Whether the loss is the model's own."""
    source: str = ""


@dataclass(slots=True)
class _Subject:
    """A fake model with its blocks, ready to be run."""

    model: nn.Module
    mode: FakeTensorMode
    paths: tuple[str, ...]
    blocks: list[nn.Module]
    layout: Layout
    workspaces: Workspaces | None
    """Measures operators of a CPU."""


def trace_module(
    source: nn.Module | Callable[[], nn.Module], batch: Any, reading: Reading
) -> ModelSpec:
    """Trace forward and backward of a model without allocating it.

    Args:
        source: The module (left as it is) or a factory for it.
        batch: A sample batch; only shapes and types are read.
        reading: What to run and for which device.

    Raises:
        TracingError: The model cannot be run on fake tensors; says where and why.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    form = NUMBER_FORMATS[reading.precision]
    model = fake_module(source, mode, getattr(torch, form.weights))
    model.train()
    subject = _subject(model, mode, reading)
    try:
        return _trace(subject, batch, reading)
    except NotSkippableError:
        layout = subject.layout
        full = replace(layout, rows=without_repetition(layout.rows))
        return _trace(replace(subject, layout=full), batch, reading)


def _subject(model: nn.Module, mode: FakeTensorMode, reading: Reading) -> _Subject:
    paths = find_blocks(model)
    modules = dict(model.named_modules())
    blocks = [modules[path] for path in paths]
    layout = Layout(paths=paths, rows=find_rows(paths, blocks))
    return _Subject(
        model=model,
        mode=mode,
        paths=paths,
        blocks=blocks,
        layout=layout,
        workspaces=Workspaces() if reading.target == "cpu" else None,
    )


def _trace(subject: _Subject, batch: Any, reading: Reading) -> ModelSpec:
    recordings = _by_policy(subject, batch, SIZES, reading)
    if not all(param.requires_grad for param in subject.model.parameters()):
        with inputs_kept():
            kept = _by_policy(subject, batch, SIZES[:2], reading)
        recordings |= {policy + INPUTS_KEPT: steps for policy, steps in kept.items()}
    cuts, uncuttable = _cut_points(subject, batch, reading)
    if cuts:
        # torch cannot split every graph: not one that needs a hidden state twice.
        with contextlib.suppress(TracingError):
            recordings[SPLIT] = [
                _record(subject, batch, size, reading, split=True) for size in SIZES[:2]
            ]
    if subject.workspaces is not None:
        subject.workspaces.measure()
        for record in (step for steps in recordings.values() for step in steps):
            record.recording.fill(subject.workspaces)
    try:
        spec = assemble(subject.model, subject.layout, SIZES, recordings)
    except LawError as error:
        raise TracingError(
            f"the model's operators change with the micro-batch ({error}), so its "
            "memory has no law; make its shapes independent of the number of samples"
        ) from error
    return replace(
        spec,
        name=reading.name,
        source=reading.source,
        # As the engines decide whether they count targets.
        counts_targets=reading.own_loss and hasattr(subject.model, "config"),
        precision=reading.precision,
        target=reading.target,
        cuts=cuts,
        uncuttable=uncuttable,
        splits=SPLIT in recordings,
        **describe_sample(batch),
    )


def _by_policy(
    subject: _Subject, batch: Any, sizes: Sequence[int], reading: Reading
) -> dict[str, list[StepRecord]]:
    """Record the step without recomputation at all sizes, and with it at two."""
    found = {"none": [_record(subject, batch, size, reading) for size in sizes]}
    for policy, apply in reading.recompute.items():
        with _recomputing(subject.blocks, reading, apply):
            found[policy] = [
                _record(subject, batch, size, reading) for size in sizes[:2]
            ]
    return found


def _record(
    subject: _Subject,
    batch: Any,
    samples: int,
    reading: Reading,
    *,
    split: bool = False,
) -> StepRecord:
    model, layout = subject.model, subject.layout
    local = fake_batch(batch, samples, subject.mode)
    known = (*model.parameters(), *model.buffers(), *_tensors(local))
    follower = StorageFollower(known, subject.workspaces)
    start = GraphStart(subject.blocks[0]) if split else None
    boundaries = UnitBoundaries(subject.blocks, layout, follower)
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda tensor, name=name: follower.gradient_ready(name, tensor)
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        with _followed(subject, follower, reading):
            loss = _loss(model, local, reading)
            follower.enter((layout.count - 1, "backward"))
            if start is None:
                loss.backward()
            else:
                params = parameter_units(model, layout)
                run_split_backward(loss, start, params, follower, boundaries)
            del loss
            follower.enter((layout.count, "backward"))
    except (BigModelError, NotSkippableError):
        raise
    except Exception as error:
        raise TracingError(_explain(error, type(model).__name__)) from error
    finally:
        boundaries.close()
        if start is not None:
            start.close()
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            parameter.grad = None
    return StepRecord(
        follower.recording, dict(boundaries.input_bytes), tuple(boundaries.calls)
    )


def _cut_points(
    subject: _Subject, batch: Any, reading: Reading
) -> tuple[tuple[int, ...], str]:
    """Return where stages can begin, and why not elsewhere."""
    model = subject.model
    refusal = reading.uncuttable(model, subject.paths)
    if refusal:
        return (), refusal
    local = fake_batch(batch, SIZES[0], subject.mode)
    follower = StorageFollower(())
    boundaries = UnitBoundaries(subject.blocks, subject.layout, follower)
    handed = HandedOver(subject.blocks)
    try:
        with _followed(subject, follower, reading):
            loss = _loss(model, local, reading)
            return find_cut_points(loss, handed.outputs, model)
    finally:
        handed.close()
        boundaries.close()


@contextlib.contextmanager
def _followed(
    subject: _Subject, follower: StorageFollower, reading: Reading
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(real_paths())
        stack.enter_context(subject.mode)
        stack.enter_context(_target_operators(reading))
        stack.enter_context(follower)
        yield


def _loss(model: nn.Module, local: Any, reading: Reading) -> torch.Tensor:
    form = NUMBER_FORMATS[reading.precision]
    with torch.autocast("cpu", getattr(torch, form.compute), enabled=form.autocast):
        return reading.loss_of(model, local)


@contextlib.contextmanager
def _recomputing(
    blocks: Sequence[nn.Module], reading: Reading, apply: Callable[[nn.Module], None]
) -> Iterator[None]:
    for block in blocks:
        # Tensor.backward hides function modes from the forwards that it recomputes.
        block.forward = _with_target_operators(block.forward, reading)
        apply(block)
    try:
        yield
    finally:
        for block in blocks:
            # The replaced forward is an instance attribute that hides the method.
            vars(block).pop("forward", None)


def _target_operators(reading: Reading) -> contextlib.AbstractContextManager[Any]:
    if reading.target == "cpu":
        return contextlib.nullcontext()
    return TargetOperators(autocast=NUMBER_FORMATS[reading.precision].autocast)


def _with_target_operators(forward: Callable[..., Any], reading: Reading):
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _target_operators(reading):
            return forward(*args, **kwargs)

    return run


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _explain(error: Exception, model: str) -> str:
    """Say where in the user's model tracing failed, why, and what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next(
        (f for f in reversed(frames) if not f.filename.startswith(_NOT_THE_USERS)),
        frames[-1],
    )
    kind = type(error).__name__
    cure = "check that the sample batch is what the model's forward expects"
    if "DataDependent" in kind or "data-dependent" in str(error):
        cure = (
            "the model reads the values of tensors (.item(), a mask as a condition, "
            "nonzero); there are no values while tracing: guard that code, or make the "
            "shape independent of the data"
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else kind
    return (
        f"{model} could not be traced: {kind} in {place.name}, line {place.lineno} of "
        f"{place.filename}: {reason}; {cure}"
    )
