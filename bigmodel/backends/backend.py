"""What a backend says of itself before anything runs.

Which plans it accepts, which it offers to the search, what they do to memory and time.
Pure: no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields
from typing import ClassVar

from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import OPTIMIZERS, ModelSpec
from bigmodel.plans import Plan
from bigmodel.plans.training_plan import PRECISIONS
from bigmodel.simulator import Costs, Program

_FOR_SOME = (
    "zero_stage",
    "stages",
    "devices_per_process",
    "compile",
    "offload",
    "ddp",
    "fsdp2",
    "deepspeed",
    "fairscale",
    "horovod",
)
"""Fields of a plan that not every backend obeys."""


class AbstractBackend(ABC):
    """One way of training, described."""

    name: str
    """As `Plan.backend` spells it."""
    obeys: ClassVar[frozenset[str]] = frozenset()
    """Fields of a plan, of those that not all backends obey, that this one does. In the
    others a plan must keep the default, so that no option is silently without effect.
    """
    offered: ClassVar[bool] = True
    """Whether the search considers it without being asked by name."""
    precisions: ClassVar[tuple[str, ...]] = PRECISIONS
    """Number formats that it trains in."""
    shares_checkpoints: ClassVar[bool] = True
    """Whether its checkpoints can be read under any plan, and any plan's by it."""
    fills_from_first_rank: ClassVar[bool] = False
    """Its engine takes a model on the `meta` device on all ranks but the first, and
    gives every rank rank 0's values itself; no other rank ever holds the whole model.
    """

    @abstractmethod
    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield what this backend refuses in a plan, of a model, on a cluster."""

    def device_violations(self, plan: Plan, kind: str) -> Iterator[Violation]:
        """Yield what this backend cannot do on a kind of device, `cuda` or `cpu`."""
        return iter(())

    def steps_parts(self, plan: Plan) -> bool:
        """Say whether optimizers are given parts of parameters, not whole ones."""
        return False

    @abstractmethod
    def layouts(self, costs: Costs) -> Iterator[Plan]:
        """Yield every layout that uses all devices of the cluster.

        A layout is a plan with micro-batch 1 and without recomputation, whose precision
        and optimizer do not count: the search sets them.
        """

    @abstractmethod
    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's programs.

        One for every pipeline stage, or several where its ranks differ. A program that
        does not say for which ranks it is, is that of all ranks of the stage with its
        index.
        """


def refusals(
    backend: AbstractBackend,
    plan: Plan,
    model: ModelSpec | None = None,
    cluster: Cluster | None = None,
    kind: str | None = None,
) -> Iterator[Violation]:
    """Yield all that a backend refuses: its own rules, and options without effect.

    Args:
        backend: The backend.
        plan: The plan.
        model: What it is for, if known.
        cluster: Where it is to run, if known.
        kind: Kind of the devices, where the cluster is not known.
    """
    if plan.precision not in backend.precisions:
        yield Violation(
            field="precision",
            got=plan.precision,
            rule=f"backend {backend.name!r} trains in {', '.join(backend.precisions)}",
        )
    defaults = {entry.name: entry for entry in fields(Plan)}
    for name in _FOR_SOME:
        entry, value = defaults[name], getattr(plan, name)
        default = (
            entry.default_factory()
            if callable(entry.default_factory)
            else entry.default
        )
        if name not in backend.obeys and value != default:
            yield Violation(
                field=name,
                got=value,
                rule=f"it would have no effect under backend {backend.name!r}",
                cure="leave it at its default, or use a backend that obeys it",
            )
    yield from _optimizer_violations(backend, plan)
    yield from backend.violations(plan, model, cluster)
    kind = cluster.device.kind if cluster is not None else kind
    if kind is not None:
        yield from backend.device_violations(plan, kind)


def _optimizer_violations(backend: AbstractBackend, plan: Plan) -> Iterator[Violation]:
    if plan.optimizer not in OPTIMIZERS:
        return
    if OPTIMIZERS.get(plan.optimizer).factored and backend.steps_parts(plan):
        yield Violation(
            field="optimizer",
            got=plan.optimizer,
            rule="it keeps rows and columns of whole matrices, and this plan gives it "
            "parts of them",
            cure="use a plan that keeps parameters whole (ddp, zero_stage 1 of ddp or "
            "fairscale), or another optimizer",
        )


def divisors(number: int) -> list[int]:
    """Return all divisors, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]
