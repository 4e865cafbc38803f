"""Training with DeepSpeed's pipeline engine."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bigmodel.backends.batch import num_samples, split
from bigmodel.backends.deepspeed_library import import_deepspeed
from bigmodel.backends.deepspeed_pipeline.config import pipeline_config
from bigmodel.backends.engine import AbstractEngine, Batch, Job, LossShare, Update
from bigmodel.backends.forward import compute_loss, model_inputs
from bigmodel.backends.optimizers import build_optimizer
from bigmodel.backends.precision import autocast, cast_inputs
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.sequential_units import check_sequential, stage_bounds
from bigmodel.backends.stage_gathering import gather_weights
from bigmodel.backends.tied_names import (
    first_names,
    tied_names,
    under_first_names,
)
from bigmodel.errors import UsageError, Violation
from bigmodel.plans import micro_batches as divisors

_TAG = "state"
"""Name of the folder that DeepSpeed makes within a checkpoint."""


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank.

    The job's model is cut down in place: what other stages own is freed.

    Raises:
        UsageError: The model cannot be cut, or a stage has nothing to train.
    """
    check_sequential(job.model, job.plan.units, job.plan.backend)
    return DeepSpeedPipelineEngine(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Labels:
    """What DeepSpeed hands to the loss with the last stage's output."""

    batch: Batch
    weight: LossShare
    """What the mean loss is multiplied with."""


@final
class DeepSpeedPipelineEngine(AbstractEngine):
    """One stage of one of as many pipelines as data ranks.

    `train_batch` runs DeepSpeed's schedule but for its last instruction, the
    optimizer's step, which `update` runs. All micro-batches of a step must have one
    shape; from step to step it may change.
    """

    def __init__(self, job: Job) -> None:
        deepspeed = import_deepspeed(job.device)
        # A PipelineModule asks DeepSpeed for the ranks before `initialize` is called.
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        stage_module = importlib.import_module(
            "bigmodel.backends.deepspeed_pipeline.stage_module"
        )
        self._plan = plan = job.plan
        self._loss = job.loss
        self._clip_norm = job.clip_norm
        self._device = job.device
        self._scaled = plan.number_format.scaled
        model: Any = job.model
        self._whole: nn.Sequential = model
        self._order = tuple(model.state_dict())
        first = first_names(tied_names(model))
        factory = under_first_names(job.optimizer, first)
        bounds = stage_bounds(model, plan)
        children = list(model.named_children())
        _check_trained(children, bounds)
        stage = plan.mesh.stage(dist.get_rank())
        self._held = children[bounds[stage] : bounds[stage + 1]]
        apply_recompute(dict(self._held), plan)
        # It prints how it seeds layers, which it does not.
        with contextlib.redirect_stdout(io.StringIO()):
            module = stage_module.StageModule(
                [child for _, child in children], bounds, plan, self._weighed_loss
            )
        for name, _ in children[: bounds[stage]] + children[bounds[stage + 1] :]:
            # `del model[index]` would number the rest anew and so rename its weights.
            delattr(model, name)
        self._optimizer = build_optimizer(factory, self._trained())
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._optimizer,
            config=pipeline_config(plan, job.clip_norm),
            dist_init_required=False,
        )
        self._engine.clip_fp32_gradients = self._clip_fp32
        self._engine._INSTRUCTION_MAP = _instructions(self._engine)
        self._norm: Tensor | None = None
        self._shapes: Any = None

    def forward_backward(
        self, micro_batches: Sequence[Batch], shares: Sequence[LossShare]
    ) -> Tensor:
        """Run the schedule; gradients are reduced after the last micro-batch."""
        count = self._plan.accumulation
        self._expect(micro_batches, count)
        # DeepSpeed divides by their number.
        weights = [share * count for share in shares]
        self._engine.train_batch(self._items(micro_batches, weights))
        self._engine.fwd_outputs = []
        return self._engine.dp_group_loss.clone()

    def update(self) -> Update:
        """Clip by the norm over all stages, step and drop the gradients."""
        try:
            self._engine._exec_optimizer_step()
        except Exception as error:
            if self._scaled and "already at minimum" in str(error):
                raise UsageError(
                    "gradients are not finite although the loss is no longer scaled; "
                    "float16 holds no number beyond 65,504: use precision bf16 or a "
                    "lower learning rate"
                ) from error
            raise
        skipped = self._scaled and self._engine.optimizer.overflow
        if self._clip_norm is None or skipped:
            return Update(grad_norm=None, skipped=skipped)
        norm = self._norm
        if self._plan.zero_stage:
            norm = self._engine.get_global_grad_norm()
        return Update(
            grad_norm=torch.as_tensor(norm, dtype=torch.float32, device=self._device)
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer over this stage."""
        return self._optimizer

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch of any size.

        It goes through the stages in equal parts of at most the plan's micro-batch, the
        largest that divide it, and the losses of the parts are averaged. Ranks of one
        pipeline must be given the same batch.
        """
        samples = num_samples(batch)
        size = next(
            size for size in divisors(samples) if size <= self._plan.micro_batch
        )
        parts = split(batch, samples // size)
        self._expect(parts, len(parts))
        losses = self._engine.eval_batch(
            self._items(parts, [1.0] * len(parts)),
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=len(parts),
        )
        self._engine.module.train()
        total = torch.zeros((), device=self._device)
        if self._engine.is_last_stage():
            total += torch.stack([loss.float() for loss in losses]).mean()
        for kept in self._engine.pipe_buffers.values():
            kept[:] = [None] * len(kept)
        group = self._engine.grid.get_pipe_parallel_group()
        dist.broadcast(total, group=group, group_src=self._plan.mesh.pipeline - 1)
        return total

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights, in fp32 where there are masters."""
        weights = {
            name: self._full(value)
            for name, value in self._whole.state_dict(keep_vars=True).items()
        }
        group = self._engine.grid.get_pipe_parallel_group()
        return gather_weights(group, self._device, weights, self._order)

    def save(self, folder: str) -> None:
        """Write DeepSpeed's own checkpoint, a file for every layer."""
        self._engine.save_checkpoint(folder, tag=_TAG)

    def load(self, folder: str) -> None:
        """Read DeepSpeed's own checkpoint."""
        path, _ = self._engine.load_checkpoint(folder, tag=_TAG)
        if path is None:
            raise FileNotFoundError(f"{folder!r} holds no DeepSpeed checkpoint")

    def _trained(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self._whole.named_parameters()
            if parameter.requires_grad
        }

    def _weighed_loss(self, output: Any, labels: _Labels) -> Tensor:
        with autocast(self._plan, self._device):
            loss = compute_loss(self._whole, output, labels.batch, self._loss)
        # The other stages expect the step's loss in fp32.
        return loss.float() * labels.weight

    def _items(
        self, batches: Sequence[Batch], weights: Sequence[LossShare]
    ) -> Iterator[tuple[Tensor, _Labels]]:
        """Yield what the first and the last stage take of every micro-batch."""
        for batch, weight in zip(batches, weights, strict=True):
            inputs = cast_inputs(
                self._plan, model_inputs(self._whole, batch, self._loss)
            )
            values = [*inputs[0], *inputs[1].values()]
            if len(values) != 1 or not isinstance(values[0], Tensor):
                raise UsageError(
                    "an nn.Sequential is called with one tensor; give batches (inputs, "
                    "target) and a loss function"
                )
            yield values[0], _Labels(batch=batch, weight=weight)

    def _expect(self, batches: Sequence[Batch], count: int) -> None:
        """Refuse several shapes; forget the buffers of another one."""
        several = {str(_shapes(batch)): None for batch in batches}
        if len(several) > 1 or len(batches) != count:
            raise UsageError(
                Violation(
                    field="micro_batches",
                    got=f"{len(batches)} of shapes {'; '.join(several)}",
                    rule=f"a step of this pipeline takes {count} micro-batches of one "
                    "shape",
                    cure="pad sequences to a fixed length and drop the last incomplete "
                    "batch",
                )
            )
        (shapes,) = several
        if shapes != self._shapes:
            self._engine.reset_activation_shape()
            self._shapes = shapes

    def _clip_fp32(self) -> None:
        """Clip by DeepSpeed's function, whose norm its engine throws away."""
        from deepspeed.runtime.utils import clip_grad_norm_

        # It asks a global for the data-parallel ranks, which a later engine replaces.
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        groups.mpu = self._engine.mpu
        self._norm = clip_grad_norm_(
            parameters=self._engine.module.parameters(),
            max_norm=self._clip_norm,
            mpu=self._engine.mpu,
        )

    @torch.no_grad()
    def _full(self, value: Tensor) -> Tensor:
        if value.requires_grad and self._plan.number_format.masters:
            from deepspeed.utils import safe_get_full_fp32_param

            master = safe_get_full_fp32_param(value)
            if master is not None:
                return master
        return value.detach()


def _instructions(engine: Any) -> dict[Any, Any]:
    """Return DeepSpeed's instructions, two of them changed.

    The optimizer steps in `update`. After a backward nothing of the micro-batch is
    kept: DeepSpeed would keep inputs, outputs and labels until others take their place,
    and with an output its graph, which holds what was received and its gradient.
    """
    from deepspeed.runtime.pipe.schedule import BackwardPass, OptimizerStep

    def backward(self: Any, buffer_id: int) -> None:
        type(self)._exec_backward_pass(self, buffer_id)
        self.loss = self.loss.detach()
        done = ["outputs", "labels"]
        # The other stages still have to send the gradient of theirs.
        if self.is_first_stage():
            done.append("inputs")
        for name in done:
            self.pipe_buffers[name][buffer_id] = None

    return {
        **engine._INSTRUCTION_MAP,
        BackwardPass: backward,
        OptimizerStep: lambda _: None,
    }


def _check_trained(
    children: Sequence[tuple[str, nn.Module]], bounds: Sequence[int]
) -> None:
    """Refuse a stage without trained parameters, which DeepSpeed has no optimizer for.

    All ranks see the whole model, so all of them refuse.
    """
    for stage in range(len(bounds) - 1):
        held = children[bounds[stage] : bounds[stage + 1]]
        if not any(p.requires_grad for _, child in held for p in child.parameters()):
            raise UsageError(
                Violation(
                    field="stages.cuts",
                    got=f"stage {stage}: children {', '.join(n for n, _ in held)}",
                    rule="DeepSpeed's pipeline engine needs something to train in "
                    "every stage",
                    cure="cut elsewhere, or use backend 'pipeline'",
                )
            )


def _shapes(batch: Batch) -> Any:
    return pytree.tree_map(
        lambda leaf: tuple(leaf.shape) if isinstance(leaf, Tensor) else None,
        dict(batch) if isinstance(batch, dict) else batch,
    )
