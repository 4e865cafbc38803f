"""What the units of one model cost on one cluster, computed once and shared by plans."""

from __future__ import annotations

from bigmodel.clusters import Cluster
from bigmodel.models import ModelSpec, Phases, Tape, Unit
from bigmodel.simulator.segments import Segment, cut, join, without_input


class Costs:
    """Segments of units by recompute policy and micro-batch.

    Args:
        model: The traced model.
        cluster: Where it is to run.
    """

    def __init__(self, model: ModelSpec, cluster: Cluster) -> None:
        self.model = model
        self.cluster = cluster
        self._cache: dict[tuple, tuple[Segment, ...]] = {}

    def segments(
        self,
        unit: Unit,
        policy: str,
        phase: str,
        micro_batch: int,
        *,
        receives_input: bool = False,
    ) -> tuple[Segment, ...]:
        """Return the segments of a phase: `forward`, `backward`, and their ends.

        Args:
            unit: A unit of the model.
            policy: Its recompute policy.
            phase: Name of a tape of `Phases`.
            micro_batch: Samples.
            receives_input: The input lies in a receive buffer and is not freed.
        """
        key = (id(unit), policy, phase, micro_batch, receives_input)
        if key not in self._cache:
            phases = unit.phases[policy]
            tape = _keep_input(unit, phases, phase, micro_batch) if receives_input else (
                getattr(phases, phase)
            )
            self._cache[key] = cut(tape, micro_batch, self.cluster.device)
        return self._cache[key]

    def whole(
        self, unit: Unit, policy: str, phase: str, micro_batch: int, **options: bool
    ) -> Segment:
        """Return a phase as one segment."""
        key = (id(unit), policy, phase, micro_batch, tuple(options.items()), "whole")
        if key not in self._cache:
            pieces = self.segments(unit, policy, phase, micro_batch, **options)
            self._cache[key] = (join(pieces),)
        return self._cache[key][0]


def _keep_input(unit: Unit, phases: Phases, phase: str, micro_batch: int) -> Tape:
    """Return a tape without the event that frees the input, if it holds it."""
    size = unit.input_bytes_per_sample * micro_batch
    for name in ("forward", "backward", "forward_end", "backward_end"):
        tape, found = without_input(getattr(phases, name), micro_batch, size)
        if found:
            return tape if name == phase else getattr(phases, phase)
    return getattr(phases, phase)
