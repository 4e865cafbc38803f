"""DeepSpeed's `PipelineModule` with the plan's stages. Import it when DeepSpeed is.

What differs from the class that it is built on:

* stages are those of the plan; DeepSpeed's own methods only balance weights
* a parameter that children of several stages share is one in every stage that holds it,
  as `nn.Sequential` has it; DeepSpeed ties whole modules, and then leaves all their
  parameters, a head's bias too, out of the gradient norm of all stages but one
* after an evaluation every module is back in the mode that it had
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from bigmodel.backends.precision import autocast
from bigmodel.plans import Plan


@final
class StageModule(PipelineModule):
    """One stage of an `nn.Sequential`, as DeepSpeed runs it.

    Args:
        layers: All children of the model, the same ones on every rank.
        bounds: Index of the first child of every stage, and their number.
        plan: The plan.
        loss: From the output and what the data iterator gave as labels to the loss.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        bounds: Sequence[int],
        plan: Plan,
        loss: Callable[[Any, Any], Tensor],
    ) -> None:
        # Asked for by the base class before there is a module.
        self._bounds = list(bounds)
        self._plan = plan
        self._modes: dict[nn.Module, bool] = {}
        self._shared: list[tuple[nn.Parameter, Any]] = []
        super().__init__(
            layers=list(layers), num_stages=plan.mesh.pipeline, loss_fn=loss
        )
        # It would keep the layers of all stages.
        self._layer_specs = list(self.forward_funcs)
        self._share(layers)

    def forward(self, forward_input: Any) -> Any:
        """Run the stage's children one after the other."""
        with autocast(self._plan, next(self.parameters()).device):
            return super().forward(forward_input)

    def train(self, mode: bool = True) -> StageModule:
        """Switch to evaluation, or back to the modes before."""
        if not mode:
            self._modes = {module: module.training for module in self.modules()}
            super().train(False)
        elif not self.training:
            for module, was in self._modes.items():
                module.training = was
            self.training = True
        return self

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the trained parameters that other stages hold too."""
        return self._shared

    def _partition_layers(self, method: str = "") -> None:
        bounds = self._bounds
        self.parts = bounds
        stage: int = self.stage_id
        self._set_bounds(start=bounds[stage], stop=bounds[stage + 1])

    def _index_tied_modules(self) -> dict[str, Any]:
        return {}

    def _share(self, layers: Sequence[nn.Module]) -> None:
        """Make groups for parameters of several stages, and mark what a norm counts."""
        holders: dict[nn.Parameter, list[int]] = {}
        bounds = self._bounds
        for stage in range(len(bounds) - 1):
            held = layers[bounds[stage] : bounds[stage + 1]]
            for parameter in nn.ModuleList(held).parameters():
                holders.setdefault(parameter, []).append(stage)
        mesh, rank = self._plan.mesh, dist.get_rank()
        copies: set[nn.Parameter] = set()
        for parameter, stages in holders.items():
            if len(stages) == 1:
                continue
            # Every rank must take part in making every group, in the same order.
            for share in range(mesh.data_parallel):
                ranks = [mesh.stage_ranks(stage)[share] for stage in stages]
                group = dist.new_group(ranks)
                if rank in ranks and parameter.requires_grad:
                    self._shared.append((parameter, group))
            if self.stage_id in stages[1:]:
                copies.add(parameter)
        for parameter in self.parameters():
            marks: Any = parameter
            marks.ds_pipe_replicated = parameter in copies
            # Without it `clip_grad_norm_` (runtime/utils.py) counts the gradients of
            # the first stage alone, whose rank in the pipeline is 0.
            marks.model_parallel = parameter not in copies
