"""Training in pipeline stages with torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.utils import _pytree as pytree

from bigmodel.backends.batch import num_samples, split
from bigmodel.backends.engine import AbstractEngine, Batch, Job, LossShare, Update
from bigmodel.backends.fp32_sums import Fp32Sums
from bigmodel.backends.pipeline.batch_statistics import warn_of_batch_norm
from bigmodel.backends.pipeline.clipping import clip_gradients
from bigmodel.backends.pipeline.cutting import check_model, cut_model
from bigmodel.backends.pipeline.data_parallel import reshard, spread
from bigmodel.backends.pipeline.relay import PLACEHOLDER, Ends, Line, relay
from bigmodel.backends.pipeline.shared_weights import (
    find_shared,
    sum_gradients,
)
from bigmodel.backends.pipeline.stage import Stage
from bigmodel.backends.pipeline.stage_models import as_one, job_for_each
from bigmodel.backends.pipeline.summing_stage import SummingStage
from bigmodel.backends.pipeline.torch_schedules import torch_schedule
from bigmodel.backends.recompute import apply_recompute
from bigmodel.backends.stage_gathering import gather_weights
from bigmodel.backends.state_files import load_state, save_state
from bigmodel.backends.tied_names import (
    first_names,
    tied_names,
    under_first_names,
)
from bigmodel.backends.updating import Updater
from bigmodel.errors import InvalidPlanError, UsageError, Violation
from bigmodel.plans import Plan
from bigmodel.plans import micro_batches as divisors


def build(job: Job) -> AbstractEngine:
    """Return the engine of this rank.

    The job's model is cut down in place: what other stages own is freed.

    Raises:
        UsageError: The model cannot be cut.
    """
    check_model(job)
    return PipelineEngine(job)


@final
class PipelineEngine(AbstractEngine):
    """The stages of this rank, in one of as many pipelines as data ranks.

    All micro-batches of a step must have one shape. From step to step it may change,
    at the price of one forward that finds out the shapes between the stages; not when
    stages are sharded, where all data ranks would have to change together.
    """

    def __init__(self, job: Job) -> None:
        self._plan = plan = job.plan
        if plan.stages is None:
            raise InvalidPlanError("a plan of backend 'pipeline' has stages")
        self._torch_schedule = torch_schedule(plan.stages.schedule)
        mesh = init_device_mesh(
            job.device.type,
            tuple(plan.mesh.axes().values()),
            mesh_dim_names=tuple(plan.mesh.axes()),
        )
        rank = plan.mesh.stage(dist.get_rank())
        held = plan.rank_stages(rank)
        owners = {
            stage: other
            for other in range(plan.mesh.pipeline)
            for stage in plan.rank_stages(other)
        }
        self._line = Line(
            group=mesh.get_group("pipeline"),
            rank=rank,
            owners=tuple(owners[stage] for stage in range(plan.num_stages)),
            device=job.device,
        )
        tied = tied_names(job.model)
        self._first_names = first_names(tied)
        factory = under_first_names(job.optimizer, self._first_names)
        self._names = tuple(job.model.state_dict())
        sharded = plan.mesh.shard > 1
        self._stages: dict[int, Stage] = {}
        blocks: dict[int, dict[str, nn.Module]] = {}
        for index, part in zip(held, job_for_each(job, len(held)), strict=True):
            cut = cut_model(part, index)
            units = plan.stage_units(index)
            blocks[index] = {
                name: part.model.get_submodule(name)
                for name in plan.units[units.start : units.stop]
            }
            apply_recompute(blocks[index], plan)
            self._stages[index] = stage = Stage(part, cut)
            if not sharded:
                # FSDP2 moves block after block, and holds only its shard of each.
                stage.to(job.device)
            cut.watch_first_run()
        models = [stage.model for stage in self._stages.values()]
        for model in models:
            warn_of_batch_norm(model, plan.micro_batch, plan.accumulation)
        self._shared = find_shared(as_one(models), tied, plan.mesh)
        _check_ties(models, tied, plan)
        self._wrapped: dict[int, nn.Module] = {}
        if sharded:
            self._wrapped = self._spread(blocks, mesh, None)
        self._model = as_one(models)
        self._updater = Updater(
            self._model,
            factory,
            plan,
            job.clip_norm,
            clip=self._clip,
            own_masters=not sharded,
        )
        if not sharded:
            # After the weights have their type, which DDP's buckets take over.
            self._wrapped = self._spread(blocks, mesh, self._updater.sums)
        self._schedule: Any = None
        self._shapes: Any = None
        self._verified = False

    def forward_backward(
        self, micro_batches: Sequence[Batch], shares: Sequence[LossShare]
    ) -> Tensor:
        """Run the schedule; gradients are reduced after the last micro-batch."""
        schedule = self._schedule_for(micro_batches)
        scale = self._updater.scale
        for stage in self._stages.values():
            stage.feed(micro_batches, shares, scale)
        # Only their number matters: torch hands one row to every micro-batch.
        rows = torch.zeros(
            len(micro_batches), dtype=PLACEHOLDER.dtype, device=self._line.device
        )
        losses: list[Tensor] = []
        schedule.step(
            *((rows,) if self._line.has_first else ()),
            target=rows if self._line.has_last else None,
            losses=losses,
            return_outputs=False,
        )
        if self._updater.masters is not None:
            self._updater.masters.gather_gradients()
        sum_gradients(self._updater.params, self._shared)
        total = torch.zeros((), device=self._line.device)
        for loss in losses:
            total += loss.detach() / scale.factor
        return self._line.broadcast_from_last(total)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer over this stage; None if all its layers are frozen."""
        return self._updater.optimizer

    def update(self) -> Update:
        """Clip by the norm over all stages, step and drop the gradients."""
        return self._updater.update()

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch of any size.

        It goes through the stages in equal parts of at most the plan's micro-batch, the
        largest that divide it, and the losses of the parts are averaged. Ranks of one
        pipeline must be given the same batch, and with sharded stages all data ranks
        batches of the same size.
        """
        count = num_samples(batch)
        size = next(size for size in divisors(count) if size <= self._plan.micro_batch)
        loss, _ = self._relay(split(batch, count // size))
        return self._line.broadcast_from_last(loss)

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights, in fp32 where there are masters."""
        weights = {
            name: value
            for name, value in self._model.state_dict().items()
            if isinstance(value, Tensor)
        }
        if self._updater.masters is not None:
            weights |= self._updater.params
        line = self._line
        return gather_weights(line.group, line.device, weights, self._names)

    def save(self, folder: str) -> None:
        """Write weights and optimizer states of all stages."""
        save_state(folder, self._model, self._updater, self._first_names)

    def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        load_state(folder, self._model, self._updater, self._first_names)

    def _clip(self, params: dict[str, nn.Parameter], limit: float) -> Tensor:
        counted_elsewhere = {
            weight.name for weight in self._shared if not weight.is_owner
        }
        return clip_gradients(self._line, params, counted_elsewhere, limit)

    def _schedule_for(self, micro_batches: Sequence[Batch]) -> Any:
        """Return torch's schedule for micro-batches of these shapes."""
        several = {str(_shapes(batch)): None for batch in micro_batches}
        if len(several) > 1 or len(micro_batches) != self._plan.accumulation:
            raise UsageError(
                Violation(
                    field="micro_batches",
                    got=f"{len(micro_batches)} of shapes {'; '.join(several)}",
                    rule=f"a step of this pipeline takes {self._plan.accumulation} "
                    "micro-batches of one shape",
                    cure="pad sequences to a fixed length and drop the last incomplete "
                    "batch",
                )
            )
        (shapes,) = several
        if self._schedule is not None and shapes == self._shapes:
            return self._schedule
        if self._schedule is not None and self._plan.mesh.shard > 1:
            raise UsageError(
                Violation(
                    field="micro_batches",
                    got=shapes,
                    rule="with sharded stages the shape of micro-batches is that of "
                    f"the first step, {self._shapes}",
                    cure="pad sequences to a fixed length",
                )
            )
        self._shapes = shapes
        self._schedule = self._new_schedule(micro_batches)
        return self._schedule

    def _spread(
        self,
        blocks: dict[int, dict[str, nn.Module]],
        mesh: DeviceMesh,
        sums: Fp32Sums | None,
    ) -> dict[int, nn.Module]:
        return {
            index: spread(stage, blocks[index], self._plan, mesh, sums)
            for index, stage in self._stages.items()
        }

    def _relay(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[int, Ends]]:
        result = relay(self._line, self._stages, batches)
        for stage in self._stages.values():
            # Without a backward the root group would stay gathered until the next one.
            reshard(stage)
        if not self._verified:
            # Told to all stages, or the others would wait for the one that raises.
            everyone: list[list[str]] = [[] for _ in range(self._line.size)]
            mine = [text for s in self._stages.values() for text in s.cut.complaints]
            dist.all_gather_object(everyone, mine, group=self._line.group)
            complaints = dict.fromkeys(text for texts in everyone for text in texts)
            if complaints:
                raise UsageError("\n".join(complaints))
            self._verified = True
        return result

    def _new_schedule(self, micro_batches: Sequence[Batch]) -> Any:
        line = self._line
        _, ends = self._relay(micro_batches[:1])
        stages = [
            SummingStage(
                wrapped,
                index,
                len(line.owners),
                line.device,
                input_args=ends[index].entry.example(),
                output_args=ends[index].leaving.example(),
                group=line.group,
                sums=self._updater.sums,
            )
            for index, wrapped in self._wrapped.items()
        ]
        make: Any = self._torch_schedule
        return make(
            stages if issubclass(make, PipelineScheduleMulti) else stages[0],
            n_microbatches=len(micro_batches),
            loss_fn=_own_loss,
            # The stage has divided its loss already.
            scale_grads=False,
        )


def _own_loss(loss: Tensor, target: Tensor) -> Tensor:
    """Hand on the loss, which the last stage computes itself."""
    return loss


def _check_ties(
    models: Sequence[nn.Module], tied: tuple[tuple[str, ...], ...], plan: Plan
) -> None:
    """Refuse a weight that two replicated or sharded stages of one rank hold."""
    if len(models) == 1 or plan.mesh.data_parallel == 1:
        return
    names = [set(dict(m.named_parameters(remove_duplicate=False))) for m in models]
    for several in tied:
        if sum(bool(held & set(several)) for held in names) > 1:
            raise UsageError(
                Violation(
                    field="stages.schedule",
                    got=plan.stages and plan.stages.schedule,
                    rule=f"two stages of one rank share {several[0]}, and each would "
                    "average its gradient over the data-parallel ranks by itself",
                    cure="use 1f1b or interleaved, or a mesh of pipeline stages alone",
                )
            )


def _shapes(batch: Batch) -> Any:
    return pytree.tree_map(
        lambda leaf: tuple(leaf.shape) if isinstance(leaf, Tensor) else None,
        dict(batch) if isinstance(batch, dict) else batch,
    )
