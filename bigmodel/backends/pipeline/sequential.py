"""Cutting a plain `nn.Sequential`: a stage is a run of its children.

children   0    1    2    3    4          units 1, 2, 3; cuts (2,)
stage 0    0    1    2                    what comes before the first unit goes
stage 1                   3    4          along, what lies between two units too
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bigmodel.backends.engine import Batch, Job
from bigmodel.backends.pipeline.cut import AbstractCut
from bigmodel.errors import Violation


class SequentialCut(AbstractCut):
    """One stage of an `nn.Sequential` whose children are the units."""

    def __init__(self, job: Job, stage: int) -> None:
        super().__init__(job, stage)
        plan = job.plan
        children = [name for name, _ in job.model.named_children()]
        starts = [
            children.index(plan.units[plan.stage_units(index).start])
            for index in range(plan.num_stages)
        ]
        bounds = [0, *starts[1:], len(children)]
        for name in children[: bounds[stage]] + children[bounds[stage + 1] :]:
            # `del model[index]` would number the rest anew and so rename its weights.
            delattr(job.model, name)

    def run(self, hidden: Tensor | None, batch: Batch) -> Any:
        """Run the stage's children one after the other."""
        if hidden is not None:
            return self.model(hidden)
        positional, named = self._inputs(batch)
        # nn.Sequential knows one input and no keywords.
        return self.model(*positional, *named.values())


def sequential_violations(job: Job) -> list[Violation]:
    """Return why the units of an `nn.Sequential` cannot be cut into stages."""
    children = [name for name, _ in job.model.named_children()]
    places = [children.index(unit) for unit in job.plan.units if unit in children]
    if len(places) == len(job.plan.units) and places == sorted(set(places)):
        return []
    return [
        Violation(
            field="units",
            got=job.plan.units,
            rule="the units of a pipeline over an nn.Sequential must be children of "
            "it, in their order",
            cure=f"name some of {', '.join(children)}",
        )
    ]


def is_sequential(model: nn.Module) -> bool:
    """Return whether a model runs its children one after the other and nothing else."""
    return (
        isinstance(model, nn.Sequential)
        and type(model).forward is nn.Sequential.forward
    )
