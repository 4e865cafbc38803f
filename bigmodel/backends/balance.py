"""Cutting a row of units so that the slowest stage is as fast as can be.

Dynamic programming over cut positions: best[s][i] is the least slowest stage when the
first i units are spread over s stages; O(stages x units^2), exact. Equal results prefer
later cuts, so that the last stage, which also holds the head and the loss, is smallest.
"""

from __future__ import annotations

from bigmodel.simulator import Costs


def balanced_cuts(costs: Costs, num_stages: int) -> tuple[int, ...]:
    """Return the index of the first unit of every stage but the first.

    Args:
        costs: Of a model that can be cut at least `num_stages - 1` times.
        num_stages: Number of stages.
    """
    allowed = costs.model.cuts
    seconds = _unit_seconds(costs)
    sums = [0.0]
    for value in seconds:
        sums.append(sums[-1] + value)
    count = len(seconds)
    best = sums[:]
    choices: list[list[int]] = []
    for stages in range(2, num_stages + 1):
        following, chosen = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stages, count + 1):
            for cut in allowed:
                if not stages - 1 <= cut < end:
                    continue
                slowest = max(best[cut], sums[end] - sums[cut])
                if slowest <= following[end]:
                    following[end], chosen[end] = slowest, cut
        best = following
        choices.append(chosen)
    cuts: list[int] = []
    end = count
    for chosen in reversed(choices):
        end = chosen[end]
        cuts.append(end)
    return tuple(reversed(cuts))


def _unit_seconds(costs: Costs) -> list[float]:
    """Return forward and backward of every block; the ends bear what is around them."""
    seconds: list[float] = []
    pending = 0.0
    for placed in costs.model.sequence:
        spent = sum(
            segment.seconds
            for phase in ("forward", "backward")
            for segment in costs.segments(placed.unit, "none", phase, 1)
        )
        if placed.role == "block":
            seconds.append(spent + pending)
            pending = 0.0
        elif placed.role == "after" and seconds:
            seconds[-1] += spent
        else:
            pending += spent
    return seconds
