"""Gradients of half-precision weights, added up over micro-batches in fp32.

In bfloat16 a sum of ones ends at 256. So, where a step has several micro-batches, a
gradient is moved to its fp32 master as soon as autograd has made it. Under DDP the
gradients of the last micro-batch go to their bucket; a communication hook adds the sums
of the others to it and averages the whole in fp32:

    micro-batch 0 .. n-2   gradient ── add ──> master.grad
    micro-batch n-1        gradient ──> bucket + master.grad ── average ──> master.grad
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]
"""A communication hook of DDP: from its state and a bucket to the averaged bucket."""


@final
class Fp32Sums:
    """Moves gradients to masters, during backward or after it.

    Args:
        masters: The fp32 copy of every trained parameter, which is given gradients.
        during_backward: Whether gradients are moved as they are made; else they stay
            with their parameters until `finish`.
    """

    def __init__(
        self, masters: Mapping[nn.Parameter, nn.Parameter], *, during_backward: bool
    ) -> None:
        self.during_backward = during_backward
        self._masters = dict(masters)
        self._wrappers: dict[nn.Parameter, DistributedDataParallel] = {}
        self._used: set[nn.Parameter] = set()
        self._averaged = False
        if during_backward:
            for parameter in masters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def average_by(
        self, wrapped: DistributedDataParallel, state: Any, hook: Hook
    ) -> None:
        """Let DDP average sums, not the gradients of its last micro-batch.

        Args:
            wrapped: Around parameters that have masters here.
            state: Of the hook.
            hook: How buckets are averaged; it is given fp32.
        """
        for parameter in wrapped.module.parameters():
            if parameter in self._masters:
                self._wrappers[parameter] = wrapped
        # Without annotations, which DDP compares with its own classes.
        wrapped.register_comm_hook(
            state, lambda state, bucket: self._average(hook, state, bucket)
        )

    @torch.no_grad()
    def move(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the gradients that these parameters have to the sums."""
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            master = self._masters[parameter]
            if master.grad is None:
                master.grad = gradient.to(torch.float32)
            else:
                master.grad.add_(gradient)

    def finish(self) -> None:
        """End a window: the sums are gradients of masters, and parameters have none.

        Collective where DDP looks for unused parameters.
        """
        for parameter in self._wrappers:
            # Views of the bucket, which held the last micro-batch.
            parameter.grad = None
        self.move(self._masters)
        if self._averaged:
            for wrapped in dict.fromkeys(self._wrappers.values()):
                if wrapped.find_unused_parameters:
                    self._drop_unused(wrapped)
        self._averaged = False
        self._used.clear()

    def _on_gradient(self, parameter: Any) -> None:
        self._used.add(parameter)
        wrapped = self._wrappers.get(parameter)
        if wrapped is None or not wrapped.require_backward_grad_sync:
            self.move([parameter])

    @torch.no_grad()
    def _average(
        self, hook: Hook, state: Any, bucket: GradBucket
    ) -> torch.futures.Future[Tensor]:
        self._averaged = True
        half = bucket.buffer()
        flat = half.to(torch.float32)
        parameters: Any = bucket.parameters()
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            master = self._masters[parameter]
            total = _in_layout_of(master, part)
            if master.grad is not None:
                total.add_(master.grad)
            # The sum lives in the bucket from here on.
            master.grad = total
        bucket.set_buffer(flat)

        def hand_over(done: torch.futures.Future[Any]) -> Tensor:
            averaged = done.value()
            if averaged.data_ptr() != flat.data_ptr():
                flat.copy_(averaged.view_as(flat))
            return half

        return hook(state, bucket).then(hand_over)

    def _drop_unused(self, wrapped: DistributedDataParallel) -> None:
        """Leave out parameters that no rank used; the bucket holds zeros for them."""
        params = [p for p, by in self._wrappers.items() if by is wrapped]
        used = torch.tensor(
            [p in self._used for p in params],
            dtype=torch.uint8,
            device=params[0].device,
        )
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=wrapped.process_group)
        for parameter, anywhere in zip(params, used.tolist(), strict=True):
            if not anywhere:
                self._masters[parameter].grad = None


def _in_layout_of(like: Tensor, flat: Tensor) -> Tensor:
    """Return a part of a bucket as a tensor; DDP keeps the order of the memory."""
    if like.is_contiguous():
        return flat.view_as(like)
    return flat.as_strided(like.size(), like.stride(), flat.storage_offset())
