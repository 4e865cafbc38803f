"""Forward only, from stage to stage: evaluation, and the shapes of hidden states.

torch's schedules must know the shapes of what they receive. Left alone they find out by
a forward and a backward in training mode, which moves the statistics of BatchNorm; here
the first evaluation-mode forward tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bigmodel.backends.engine import Batch
from bigmodel.backends.evaluation import evaluating
from bigmodel.backends.pipeline.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A tensor that passes from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """Whether anything before it is trained."""

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
    """The ranks of the pipeline, in the order of the stages."""
    stage: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether nothing comes before this stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after this stage."""
        return self.stage == self.count - 1

    def broadcast_from_last(self, tensor: Tensor) -> Tensor:
        """Fill a tensor on every rank with what the last stage has in it."""
        dist.broadcast(tensor, group=self.group, group_src=self.count - 1)
        return tensor


def relay(
    line: Line, stage: Stage, batches: Sequence[Batch]
) -> tuple[Tensor, Boundary, Boundary]:
    """Run batches of equal shape through all stages in evaluation mode.

    Args:
        line: The place of this rank.
        stage: The stage, not DDP around it.
        batches: The same ones on every rank of the pipeline.

    Returns:
        The mean loss, valid on the last stage, and what enters and leaves this stage.
    """
    total = torch.zeros((), dtype=torch.float32, device=line.device)
    entry = leaving = PLACEHOLDER
    trained = any(parameter.requires_grad for parameter in stage.parameters())
    stage.feed(batches)
    with evaluating(stage):
        for index in range(len(batches)):
            if not line.is_first and index == 0:
                entry = _receive_boundary(line)
            hidden = torch.empty(entry.shape, dtype=entry.dtype, device=line.device)
            if not line.is_first:
                dist.recv(hidden, group=line.group, group_src=line.stage - 1)
            output = stage(hidden)
            if line.is_last:
                total += output / len(batches)
                continue
            if index == 0:
                leaving = Boundary(
                    shape=tuple(output.shape),
                    dtype=output.dtype,
                    requires_grad=trained or entry.requires_grad,
                )
                _send_boundary(line, leaving)
            dist.send(output, group=line.group, group_dst=line.stage + 1)
    return total, entry, leaving


def _send_boundary(line: Line, boundary: Boundary) -> None:
    dist.send_object_list(
        [boundary], group=line.group, group_dst=line.stage + 1, device=line.device
    )


def _receive_boundary(line: Line) -> Boundary:
    received: list[Boundary] = [PLACEHOLDER]
    dist.recv_object_list(
        received, group=line.group, group_src=line.stage - 1, device=line.device
    )
    return received[0]
