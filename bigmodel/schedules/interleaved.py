"""Interleaved schedules: a rank holds several stages, one from each lap of the model.

Two ranks, four stages, four micro-batches; a number is a micro-batch, its row a stage:

    rank 0  stage 0  F0 F1 .  .  F2 .  F3 .  ...
            stage 2  .  .  F0 F1 .  .  B0 ...      2 B0 comes from stage 3 on rank 1
    rank 1  stage 1  .  F0 F1 .  .  ...
            stage 3  .  .  .  F0 B0 F1 B1 ...

Micro-batches go in rounds of about as many as there are ranks: a rank runs a round
through its first stage, then through its next one. A rank warms up with the rounds of
all its stages but the last, and two forwards more for every rank after it. The bubble
is that of 1F1B divided by the stages of a rank. Source: Narayanan et al. 2021, arXiv
2104.04473; warm-up and rounds are those of torch's `ScheduleInterleaved1F1B`.

The zero-bubble form runs the gradients of weights apart, where a rank would wait; it
warms up with one forward for every rank after it. Source: Qi et al. 2023, arXiv
2401.10241 (ZB1P), as torch's `ScheduleInterleavedZeroBubble`.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.schedules.action import Action, Phase, Rows


def rows(num_ranks: int, num_stages: int, num_micro_batches: int) -> Rows:
    """Return the actions of every rank of interleaved 1F1B."""
    return tuple(
        _one_f_one_b(rank, num_ranks, num_stages // num_ranks, num_micro_batches)
        for rank in range(num_ranks)
    )


def zero_bubble_rows(num_ranks: int, num_stages: int, num_micro_batches: int) -> Rows:
    """Return the actions of every rank of interleaved zero bubble."""
    return tuple(
        _zero_bubble(rank, num_ranks, num_stages // num_ranks, num_micro_batches)
        for rank in range(num_ranks)
    )


def refusal(num_ranks: int, num_stages: int, num_micro_batches: int) -> str:
    """Return why micro-batches do not make equal rounds."""
    rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % rounds:
        return (
            f"micro-batches go through {num_ranks} ranks in rounds of equal size, and "
            f"{num_micro_batches} do not divide into {rounds}"
        )
    return ""


def _one_f_one_b(
    rank: int, ranks: int, laps: int, micro_batches: int
) -> tuple[Action, ...]:
    forwards = list(_in_rounds("F", rank, ranks, laps, micro_batches))
    backwards = list(_in_rounds("B", rank, ranks, laps, micro_batches))
    warm_up = _warm_up(rank, ranks, laps, micro_batches, hop=2)
    row = forwards[:warm_up]
    for index, forward in enumerate(forwards[warm_up:]):
        row += [forward, backwards[index]]
    return (*row, *backwards[len(forwards) - warm_up :])


def _zero_bubble(
    rank: int, ranks: int, laps: int, micro_batches: int
) -> tuple[Action, ...]:
    forwards = list(_in_rounds("F", rank, ranks, laps, micro_batches))
    inputs = list(_in_rounds("I", rank, ranks, laps, micro_batches))
    weights = _in_rounds("W", rank, ranks, laps, micro_batches)
    warm_up = _warm_up(rank, ranks, laps, micro_batches, hop=1)
    row = forwards[:warm_up]
    for index, backward in enumerate(inputs):
        if warm_up + index < len(forwards):
            row.append(forwards[warm_up + index])
        row.append(backward)
        # A rank lets as many wait as there are ranks before it.
        if index >= rank:
            row.append(next(weights))
    return (*row, *weights)


def _in_rounds(
    phase: Phase, rank: int, ranks: int, laps: int, micro_batches: int
) -> Iterator[Action]:
    """Yield one phase of all micro-batches, round after round, lap after lap."""
    per_round = _per_round(ranks, micro_batches)
    order = range(laps) if phase == "F" else reversed(range(laps))
    stages = [lap * ranks + rank for lap in order]
    for begin in range(0, micro_batches, per_round):
        for stage in stages:
            for index in range(begin, begin + per_round):
                yield Action(stage, phase, index)


def _per_round(ranks: int, micro_batches: int) -> int:
    return micro_batches // max(1, micro_batches // ranks)


def _warm_up(rank: int, ranks: int, laps: int, micro_batches: int, *, hop: int) -> int:
    rounds = (laps - 1) * _per_round(ranks, micro_batches)
    return min(rounds + hop * (ranks - 1 - rank), laps * micro_batches)
