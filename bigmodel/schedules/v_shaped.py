"""V-shaped schedules: a rank holds one stage on the way down and one on the way back.

    rank 0   stage 0   stage 5      the first and the last stage share a rank, so a loss
    rank 1   stage 1   stage 4      turns round where it is made, and activations are
    rank 2   stage 2   stage 3      spread evenly over the ranks

In the drawings a rank's stages are `a` (down) and `b` (back); `I` and `W` are the two
parts of a backward, `B` both at once.

    ZBV        Fa ...  | Fb Fa ... | Fb Ib Wb ... | Fa Ia Wa Fb Ib Wb ... | Ia Ib ... W
               rank r of p: 2(p-r)-1, r, p-r times, then while forwards are left
    DualPipeV  Fa ...  | Fa Fb ... | Ib Wb Fb ... | Fa Bb Fb Ba ... | Bb Fb Ba | ... W

Sources: Qi et al. 2023, arXiv 2401.10241, section 6; DeepSeek-V3, arXiv 2412.19437, in
its V form. Orders are those of torch's `ScheduleZBVZeroBubble` and `ScheduleDualPipeV`.
"""

from __future__ import annotations

from collections import deque

from bigmodel.schedules.action import Action, Phase, Rows


def zbv_rows(num_ranks: int, num_stages: int, num_micro_batches: int) -> Rows:
    """Return the actions of every rank of ZBV."""
    return tuple(_zbv(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))


def dual_pipe_rows(num_ranks: int, num_stages: int, num_micro_batches: int) -> Rows:
    """Return the actions of every rank of DualPipeV."""
    return tuple(
        _dual_pipe(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)
    )


def dual_pipe_refusal(num_ranks: int, num_stages: int, num_micro_batches: int) -> str:
    """Return why torch refuses to run DualPipeV."""
    if num_micro_batches < num_stages:
        return f"it needs a micro-batch for each of {num_stages} stages"
    return ""


class _Row:
    """The actions of one rank; every phase of a stage counts its micro-batches."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.down, self.back = rank, 2 * ranks - 1 - rank
        self.actions: list[Action] = []
        self.counts: dict[tuple[int, str], int] = {}
        self._pending: deque[Action] = deque()

    def add(self, stage: int, *phases: Phase) -> None:
        """Append phases of the next micro-batch of a stage."""
        for phase in phases:
            counted = "I" if phase == "B" else phase
            index = self.counts.get((stage, counted), 0)
            self.counts[stage, counted] = index + 1
            self.actions.append(Action(stage, phase, index))
            if phase == "I":
                self._pending.append(Action(stage, "W", index))

    def add_pending_weights(self) -> None:
        """Append the gradients of weights that wait longest, if any do."""
        if self._pending:
            self.actions.append(self._pending.popleft())

    def count(self, stage: int, phase: Phase) -> int:
        """Return how often a stage did a phase."""
        return self.counts.get((stage, phase), 0)


def _zbv(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    row = _Row(rank, ranks)
    down, back = row.down, row.back
    # As many as fill the pipeline; those that do not exist are left out at the end.
    count = max(2 * ranks - 1, micro_batches)
    for _ in range(2 * (ranks - rank) - 1):
        row.add(down, "F")
    for _ in range(rank):
        row.add(back, "F")
        row.add(down, "F")
    for _ in range(ranks - rank):
        row.add(back, "F", "I", "W")
    while row.count(back, "F") < row.count(down, "F") or row.count(down, "F") < count:
        if row.count(down, "F") < count:
            row.add(down, "F")
        row.add(down, "I", "W")
        row.add(back, "F", "I", "W")
    for _ in range(rank):
        row.add(down, "I")
        row.add(back, "I")
    for _ in range(ranks - rank):
        row.add(down, "I", "W")
    for stage in (back, down):
        while row.count(stage, "W") < row.count(stage, "I"):
            row.add(stage, "W")
    return tuple(a for a in row.actions if a.micro_batch < micro_batches)


def _dual_pipe(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    row = _Row(rank, ranks)
    down, back = row.down, row.back
    after = ranks - rank - 1
    for _ in range(2 * after):
        row.add(down, "F")
    for _ in range(rank + 1):
        row.add(down, "F")
        row.add(back, "F")
    for _ in range(after):
        row.add(back, "I")
        row.add_pending_weights()
        row.add(back, "F")
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        row.add(down, "F")
        row.add(back, "B")
        row.add(back, "F")
        row.add(down, "B")
    for _ in range(after):
        row.add(back, "B")
        row.add(back, "F")
        row.add(down, "B")
    _second_half_split(row, rank + 1, first=rank % 2 == 1)
    for _ in range(after):
        row.add_pending_weights()
        row.add(down, "I")
    for _ in range(rank + 1):
        row.add_pending_weights()
    return tuple(row.actions)


def _second_half_split(row: _Row, pairs: int, *, first: bool) -> None:
    """Append backwards of both stages; from the middle on in two parts.

    Args:
        row: The row.
        pairs: How many micro-batches.
        first: Whether the middle pair is split from its first backward on.
    """
    for index in range(pairs):
        later, middle = index > pairs // 2, index == pairs // 2
        row.add(row.back, "I" if later or (middle and first) else "B")
        row.add(row.down, "I" if later or middle else "B")
