"""Which unit holds the bytes at a program's peak, by kind.

The sums of the simulation are followed once more, up to the peak, with a row for every
unit. What comes belongs to the unit whose turn it is. What goes is taken from the same
unit, and where that has too little, from the one that got some last: what a unit hands
to the next one goes in the other's turn. Nothing is made up or lost, so the rows add up
to the peak.

Of what is held through the whole step, weights and states are shared out by the
parameters of the units, which is exact for whole and for evenly sharded ones; of a flat
partition a rank has a piece from somewhere, and its share is that of the average rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bigmodel.simulator.program import Holdings, Member, Program
from bigmodel.simulator.timeline import Peak

NO_UNIT = ""
"""What belongs to no single unit: the batch, buckets of all gradients."""

_SHARES: Mapping[str, Callable[[Member], int]] = {
    "weights": lambda member: member.elements,
    "fp32 master weights": lambda member: member.trainable_elements,
    "optimizer states": lambda member: member.trainable_elements,
    "gradients": lambda member: member.trainable_elements,
    "buffers": lambda member: member.buffer_bytes,
}
"""By what a holder's bytes in the base are shared out."""


def holdings_by_unit(program: Program, peak: Peak) -> tuple[tuple[str, Holdings], ...]:
    """Return for every unit who holds its bytes at the peak, largest first.

    Args:
        program: Of one rank.
        peak: Of its timeline.

    Returns:
        Units in forward order, then parts that are in no order, such as FSDP's root
        group, and last what belongs to no unit.
    """
    rows = _Rows()
    for kind, count in program.base:
        for name, share in _shared_out(kind, count, program.members):
            rows.change(name, kind, share)
    for task, name in zip(
        program.tasks[: max(peak.task, 0)], program.turns, strict=False
    ):
        for kind, count in task.change:
            rows.change(name, kind, count)
    if peak.task >= 0:
        task = program.tasks[peak.task]
        rise = max(task.surge, task.change, key=lambda held: sum(n for _, n in held))
        for kind, count in rise:
            rows.change(program.turns[peak.task], kind, count)
    order = [member.name for member in program.members]
    return rows.in_order(order)


def _shared_out(
    kind: str, count: int, members: tuple[Member, ...]
) -> list[tuple[str, int]]:
    weigh = _SHARES.get(kind)
    weights = [weigh(member) for member in members] if weigh else []
    whole = sum(weights)
    if not whole:
        return [(NO_UNIT, count)]
    shares = [count * weight // whole for weight in weights]
    # The odd bytes go to one unit, so that equal units stay equal.
    shares[weights.index(max(weights))] += count - sum(shares)
    return [(member.name, n) for member, n in zip(members, shares, strict=True)]


class _Rows:
    """Bytes by kind and unit."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, int]] = {}
        """Units of every kind, the one that got some last at the end."""
        self._owed: dict[str, int] = {}
        """Bytes of every kind that went before they came."""

    def change(self, unit: str, kind: str, count: int) -> None:
        """Give a unit bytes of a kind, or take some away."""
        row = self._kinds.setdefault(kind, {})
        owed = self._owed.get(kind, 0)
        if count > 0:
            paid = min(owed, count)
            self._owed[kind] = owed - paid
            row[unit] = row.pop(unit, 0) + count - paid
            return
        left = -count
        for name in (unit, *reversed(row)):
            taken = min(row.get(name, 0), left)
            if taken:
                row[name] -= taken
                left -= taken
            if not left:
                return
        self._owed[kind] = owed + left

    def in_order(self, order: list[str]) -> tuple[tuple[str, Holdings], ...]:
        """Return the rows, those of these units first."""
        found: dict[str, dict[str, int]] = {name: {} for name in order}
        for kind, row in self._kinds.items():
            for unit, count in row.items():
                if count:
                    found.setdefault(unit, {})[kind] = count
        last = found.pop(NO_UNIT, {})
        for kind, count in self._owed.items():
            if count:
                last[kind] = last.get(kind, 0) - count
        return tuple(
            (name, tuple(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))))
            for name, kinds in [*found.items(), (NO_UNIT, last)]
            if kinds
        )
