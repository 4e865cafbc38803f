"""Forward only, from stage to stage: evaluation, and the shapes of hidden states.

torch's schedules must know the shapes of what they receive. Left alone they find out by
a forward and a backward in training mode, which moves the statistics of BatchNorm; here
the first evaluation-mode forward tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigmodel.backends.engine import Batch
from bigmodel.backends.evaluation import evaluating
from bigmodel.backends.pipeline.cut import SLOT
from bigmodel.backends.pipeline.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A tensor that passes from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """Whether anything before it is trained."""
    form: Any = SLOT
    """How the block before returned it."""
    usable: bool = True
    """False: a stage before found out that the model cannot be cut."""

    def example(self) -> Tensor:
        """Return a tensor like it that takes no memory."""
        return torch.empty(
            self.shape,
            dtype=self.dtype,
            device="meta",
            requires_grad=self.requires_grad,
        )


PLACEHOLDER = Boundary(shape=(1,), dtype=torch.int64, requires_grad=False)
"""What enters the first stage, which takes all it needs from the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The place of a rank in its pipeline."""

    group: dist.ProcessGroup
    """The ranks of the pipeline."""
    rank: int
    """Of this process in its pipeline."""
    owners: tuple[int, ...]
    """The rank that holds each stage."""
    device: torch.device

    @property
    def size(self) -> int:
        """Number of ranks."""
        return max(self.owners) + 1

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, first one first."""
        return tuple(s for s, rank in enumerate(self.owners) if rank == self.rank)

    @property
    def has_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.owners[0] == self.rank

    @property
    def has_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.owners[-1] == self.rank

    def broadcast_from_last(self, tensor: Tensor) -> Tensor:
        """Fill a tensor on every rank with what the last stage's rank has in it."""
        dist.broadcast(tensor, group=self.group, group_src=self.owners[-1])
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What enters and leaves a stage."""

    entry: Boundary
    leaving: Boundary


def relay(
    line: Line, stages: Mapping[int, Stage], batches: Sequence[Batch]
) -> tuple[Tensor, dict[int, Ends]]:
    """Run batches of equal shape through all stages in evaluation mode.

    Args:
        line: The place of this rank.
        stages: The stages of this rank by their index, not DDP around them.
        batches: The same ones on every rank of the pipeline.

    Returns:
        The mean loss, valid on the rank of the last stage, and what enters and leaves
        the stages of this rank.
    """
    total = torch.zeros((), dtype=torch.float32, device=line.device)
    ends: dict[int, Ends] = {}
    for stage in stages.values():
        stage.feed(batches)
    with contextlib.ExitStack() as stack:
        for stage in stages.values():
            stack.enter_context(evaluating(stage))
        for first in (index == 0 for index in range(len(batches))):
            handed: tuple[Tensor, Boundary] | None = None
            for index, stage in stages.items():
                hidden, entry = handed or _receive(line, index, ends, first)
                stage.cut.entry_form = entry.form
                output = stage(hidden) if entry.usable else hidden
                handed = None
                leaving = PLACEHOLDER
                if index == len(line.owners) - 1:
                    total += output / len(batches) if entry.usable else 0
                else:
                    trained = any(p.requires_grad for p in stage.parameters())
                    leaving = Boundary(
                        shape=tuple(output.shape),
                        dtype=output.dtype,
                        requires_grad=trained or entry.requires_grad,
                        form=stage.cut.leaving_form,
                        usable=entry.usable and not stage.cut.complaints,
                    )
                    if line.owners[index + 1] == line.rank:
                        handed = output, leaving
                    else:
                        _send(line, index, output, leaving if first else None)
                ends[index] = Ends(entry=entry, leaving=leaving)
    return total, ends


def _receive(
    line: Line, stage: int, ends: Mapping[int, Ends], first: bool
) -> tuple[Tensor, Boundary]:
    """Return the input of a stage and what it is like."""
    entry = PLACEHOLDER
    before = line.owners[stage - 1]
    if stage:
        entry = _receive_boundary(line, before) if first else ends[stage].entry
    hidden = torch.empty(entry.shape, dtype=entry.dtype, device=line.device)
    if stage:
        dist.recv(hidden, group=line.group, group_src=before)
    return hidden, entry


def _send(line: Line, stage: int, output: Tensor, boundary: Boundary | None) -> None:
    """Send a stage's output to the next, and before the first one what it is like."""
    following = line.owners[stage + 1]
    if boundary is not None:
        dist.send_object_list(
            [boundary], group=line.group, group_dst=following, device=line.device
        )
    dist.send(output, group=line.group, group_dst=following)


def _receive_boundary(line: Line, source: int) -> Boundary:
    received: list[Boundary] = [PLACEHOLDER]
    dist.recv_object_list(
        received, group=line.group, group_src=source, device=line.device
    )
    return received[0]
