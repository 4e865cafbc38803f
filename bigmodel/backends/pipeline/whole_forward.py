"""Cutting any model whose blocks hand each other one tensor.

Every stage runs the model's own forward on its batch, so that masks, rotary angles and
the loss are what they are in the whole model. What other stages own is emptied:

    before the blocks    weights are replaced by zeros that take no memory; what comes
                         out of them is thrown away
    earlier blocks       hand on; the last of them hands on what was received
    own blocks           run; after the last one the forward is left
    later blocks, head   are never reached, but in the last stage

Whether the model lets itself be cut so (that a stage needs nothing of others but what
was received) is seen in the graph of the first run: no zeros may be in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bigmodel.backends.engine import Batch, Job
from bigmodel.backends.outside_units import stages_of_parts
from bigmodel.backends.pipeline.cut import SLOT, AbstractCut
from bigmodel.errors import Violation
from bigmodel.observe.blocks import get_blocks
from bigmodel.observe.graph_leaves import leaves_of


class WholeForwardCut(AbstractCut):
    """One stage of a model with blocks that run one after the other."""

    def __init__(self, job: Job, stage: int) -> None:
        super().__init__(job, stage)
        plan = job.plan
        self._kept = kept = plan.stage_units(stage)
        self._units = plan.units
        self._zeros: dict[str, Tensor] = {}
        self._device = job.device
        self._weights = getattr(torch, plan.number_format.weights)
        self._received: Tensor | None = None
        self._leaves_by_hook = False
        modules = dict(job.model.named_modules())
        owners = stages_of_parts(job.model, plan)
        for path, module in modules.items():
            if path in plan.units or any(_inside(path, part) for part in owners):
                continue
            # Weights of the model itself, or of a module around the blocks.
            if stage:
                self._replace_tensors(path, module)
        for path, owner in owners.items():
            if owner != stage and path not in plan.units:
                for name, module in modules[path].named_modules():
                    self._replace_tensors(_join(path, name), module)
        self._blocks = get_blocks(job.model, plan.units)
        for index, block in enumerate(self._blocks.values()):
            if index not in kept:
                _drop_tensors(block)
                block.forward = self._stand_in(index)

    def run(self, hidden: Tensor | None, batch: Batch) -> Any:
        """Call the model; leave it after the last block of this stage."""
        positional, named = self._inputs(batch)
        if not self.is_last and not self._leaves_by_hook:
            # Now, so that it runs after the hooks of what has been put around blocks.
            self._leaves_by_hook = True
            last = self._blocks[self._units[self._kept.stop - 1]]
            last.register_forward_hook(self._leave)
        self._received = hidden
        try:
            output = self.model(*positional, **named)
        except _LeftForward as left:
            return left.hidden
        finally:
            self._received = None
        if not self.is_last:
            self.complaints.append(
                f"the forward of {type(self.model).__name__} ends before block "
                f"{self._units[self._kept.stop - 1]}, so it cannot be cut there"
            )
        return output

    def watch_first_run(self) -> None:
        """Let the zeros show in the graph of the next run."""
        self.watches = True
        for zero in self._zeros.values():
            zero.requires_grad_(zero.is_floating_point())

    def verify(self, output: Tensor) -> None:
        """Look for zeros in the graph of what the stage computes."""
        self.watches = False
        reached = leaves_of(output)
        used = [name for name, zero in self._zeros.items() if id(zero) in reached]
        for zero in self._zeros.values():
            zero.requires_grad_(False)
        if used:
            first, last = self._kept.start, self._kept.stop - 1
            self.complaints.append(
                f"the stage of {self._units[first]} to {self._units[last]} uses "
                f"{', '.join(used[:3])}, which another stage has: "
                f"{type(self.model).__name__} cannot be cut there; use other cuts, or "
                "fsdp2 or deepspeed"
            )

    def _stand_in(self, index: int):
        def forward(*args: Any, **kwargs: Any) -> Any:
            received = self._received
            if received is None or index >= self._kept.stop:
                self.complaints.append(
                    f"{type(self.model).__name__} runs its blocks in another order "
                    f"than the plan, which has {self._units[index]} later"
                )
                raise _LeftForward(_first_tensor((args, kwargs)))
            if index == self._kept.start - 1:
                return self._in_form(received)
            return self._in_form(self._zero(self._units[index], received))

        return forward

    def _in_form(self, tensor: Tensor) -> Any:
        """Return a tensor as blocks return theirs."""
        return tree_map(lambda leaf: tensor if leaf == SLOT else leaf, self.entry_form)

    def _leave(self, _: nn.Module, args: Any, output: Any) -> None:
        self.leaving_form = tree_map(
            lambda leaf: SLOT if isinstance(leaf, Tensor) else leaf, output
        )
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(tensors) > 1 and not self.complaints:
            self.complaints.append(
                f"blocks of {type(self.model).__name__} hand each other "
                f"{len(tensors)} tensors, and a stage hands on one; use fsdp2 or "
                "deepspeed for it"
            )
        raise _LeftForward(tensors[0])

    def _replace_tensors(self, path: str, module: nn.Module) -> None:
        """Replace a module's own weights by zeros, and keep its buffers to itself."""
        for name, weight in list(module._parameters.items()):
            if weight is None:
                continue
            del module._parameters[name]
            setattr(module, name, self._zero(_join(path, name), weight))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                # Statistics of batches would move those of the stage that has them.
                module._buffers[name] = buffer.clone()
                module._non_persistent_buffers_set.add(name)

    def _zero(self, name: str, like: Tensor) -> Tensor:
        """Return zeros of a tensor's shape, all in one element."""
        zero = self._zeros.get(name)
        if zero is None or zero.shape != like.shape:
            kind = self._weights if like.is_floating_point() else like.dtype
            one = torch.zeros((), dtype=kind, device=self._device)
            zero = self._zeros[name] = one.expand(like.shape)
            if zero.is_floating_point():
                zero.requires_grad_(self.watches)
        return zero


def whole_forward_violations(job: Job) -> Iterator[Violation]:
    """Yield why a model cannot be cut between its blocks."""
    modules = dict(job.model.named_modules())
    units = job.plan.units
    kind = type(job.model).__name__
    parents = {unit.rpartition(".")[0] for unit in units}
    listed = [
        f"{parent}.{name}" if parent else name
        for parent in sorted(parents, key=lambda path: _first_place(path, units))
        for name, _ in getattr(modules.get(parent), "named_children", tuple)()
    ]
    if tuple(listed) != units or any(
        not isinstance(modules.get(parent), (nn.ModuleList, nn.Sequential))
        for parent in parents
    ):
        yield Violation(
            field="units",
            got=units,
            rule=f"the units of a pipeline over {kind} must be all blocks of its "
            "nn.ModuleLists, in their order",
            cure="make the plan for this model, or use fsdp2",
        )
    config = getattr(job.model, "config", None)
    if getattr(config, "output_router_logits", False):
        yield Violation(
            field="config.output_router_logits",
            got=True,
            rule="the experts' auxiliary loss needs the routers of all stages",
            cure="set it to False, or use fsdp2 or deepspeed",
        )


@final
class _LeftForward(BaseException):
    """Ends a forward whose rest belongs to other stages.

    No `Exception`, which a model might catch.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _drop_tensors(block: nn.Module) -> None:
    for module in block.modules():
        for tensors in (module._parameters, module._buffers):
            for name in tensors:
                tensors[name] = None


def _first_tensor(tree: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _first_place(parent: str, units: tuple[str, ...]) -> int:
    return next(i for i, unit in enumerate(units) if unit.rpartition(".")[0] == parent)


def _inside(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}.")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
