"""What a backend says of itself before anything runs.

Which plans it accepts, which it offers to the search, what they do to memory and time.
Pure: no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from bigmodel.clusters import Cluster
from bigmodel.errors import Violation
from bigmodel.models import ModelSpec
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.simulator import Costs, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a backend spreads a model; micro-batch and recomputation come on top."""

    mesh: Mesh
    zero_stage: int = 0
    reshard_after_forward: bool = True
    stages: Stages | None = None


class AbstractBackend(ABC):
    """One way of training, described."""

    name: str
    """As `Plan.backend` spells it."""

    @abstractmethod
    def violations(
        self, plan: Plan, model: ModelSpec | None, cluster: Cluster | None
    ) -> Iterator[Violation]:
        """Yield what this backend refuses in a plan, of a model, on a cluster."""

    @abstractmethod
    def layouts(self, costs: Costs) -> Iterator[Layout]:
        """Yield every layout that uses all devices of the cluster."""

    @abstractmethod
    def programs(
        self, plan: Plan, costs: Costs, micro_batches: int
    ) -> tuple[Program, ...]:
        """Return the shadow's programs, one for every pipeline stage."""


def divisors(number: int) -> list[int]:
    """Return all divisors, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]
