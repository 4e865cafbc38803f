"""What the units of a model cost on a cluster, computed once and shared by plans."""

from __future__ import annotations

from typing import Any

from bigmodel.clusters import Cluster
from bigmodel.models import ModelSpec, Param, Phases, Tape, Unit
from bigmodel.simulator.segments import (
    Segment,
    cut,
    ends_on_rank,
    join,
    with_own_gradients,
    without_free,
)

_PHASES = (
    "forward",
    "backward",
    "weights",
    "forward_end",
    "backward_end",
    "weights_end",
)
"""In the order in which they may free the input."""


class Costs:
    """Segments of units by recompute policy and micro-batch.

    Args:
        model: The traced model.
        cluster: Where it is to run.
    """

    def __init__(self, model: ModelSpec, cluster: Cluster) -> None:
        self.model = model
        self.cluster = cluster
        self._outputs = _output_bytes(model)
        self._cache: dict[tuple, tuple[Segment, ...]] = {}

    def segments(
        self,
        unit: Unit,
        policy: str,
        phase: str,
        micro_batch: int,
        *,
        receives_input: bool = False,
        receives_gradient: bool = False,
        apart: tuple[Param, ...] = (),
        beside: frozenset[int] = frozenset(),
    ) -> tuple[Segment, ...]:
        """Return the segments of a phase.

        Args:
            unit: A unit of the model.
            policy: Its recompute policy.
            phase: Name of a tape of `Phases`.
            micro_batch: Samples.
            receives_input: The input lies in a receive buffer and is not freed.
            receives_gradient: So does the gradient of the output.
            apart: Weights tied to some of another rank.
            beside: Numbers of the units of this rank, see `Storage.partner`.
        """
        received = (receives_input, receives_gradient)
        key = (id(unit), policy, phase, micro_batch, *received, apart, beside)
        if key not in self._cache:
            phases, at_end = unit.phases[policy], phase.endswith("_end")
            tape = getattr(phases, phase)
            if receives_input:
                size = unit.input_bytes_per_sample * micro_batch
                tape = _keep_input(phases, phase, micro_batch, size)
            if receives_gradient and phase in ("backward", "weights"):
                size = self._outputs[id(unit)] * micro_batch
                _, sooner = without_free(phases.backward, micro_batch, size)
                if sooner == (phase == "backward"):
                    tape, _ = without_free(tape, micro_batch, size)
            if apart and not phase.startswith("forward"):
                tape = with_own_gradients(tape, apart, at_end=at_end)
            tape = ends_on_rank(tape, beside, at_end=at_end)
            self._cache[key] = cut(tape, micro_batch, self.cluster.device)
        return self._cache[key]

    def whole(
        self, unit: Unit, policy: str, phase: str, micro_batch: int, **rank: Any
    ) -> Segment:
        """Return a phase as one segment; arguments as for `segments`."""
        key = (id(unit), policy, phase, micro_batch, *rank.values(), "whole")
        if key not in self._cache:
            pieces = self.segments(unit, policy, phase, micro_batch, **rank)
            self._cache[key] = (join(pieces),)
        return self._cache[key][0]

    def output_bytes(self, unit: Unit, micro_batch: int) -> int:
        """Return the bytes that a unit hands to the next one."""
        return self._outputs[id(unit)] * micro_batch


def _output_bytes(model: ModelSpec) -> dict[int, int]:
    units = [placed.unit for placed in model.sequence]
    handed = [unit.input_bytes_per_sample for unit in units[1:]] + [0]
    return {id(unit): count for unit, count in zip(units, handed, strict=True)}


def _keep_input(phases: Phases, phase: str, micro_batch: int, size: int) -> Tape:
    """Return a tape without the event that frees the input, if it is on this one."""
    for name in _PHASES:
        tape, found = without_free(getattr(phases, name), micro_batch, size)
        if found:
            return tape if name == phase else getattr(phases, phase)
    return getattr(phases, phase)
