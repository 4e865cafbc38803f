"""Running programs: every stream in order, every wait honoured, every byte counted."""

from __future__ import annotations

from collections.abc import Sequence

from bigmodel.errors import BigModelError
from bigmodel.simulator.program import Program, Task, total
from bigmodel.simulator.timeline import Peak, Span, Timeline


class DeadlockError(BigModelError):
    """Programs wait for messages that nobody sends: a fault of the schedule."""


def simulate(
    programs: Sequence[Program], *, spans: bool = True
) -> tuple[Timeline, ...]:
    """Run the programs of the ranks of one pipeline together.

    Args:
        programs: One for every stage; a single one where there are no stages.
        spans: Whether to keep when every task ran.

    Raises:
        DeadlockError: A message is waited for and never sent.
    """
    runs = [_Run(program, spans) for program in programs]
    sent: dict[str, float] = {}
    while any(not run.done for run in runs):
        moved = [run.advance(sent) for run in runs]
        if not any(moved):
            waiting = ", ".join(run.next.receives or "" for run in runs if not run.done)
            raise DeadlockError(f"no program can go on; they wait for {waiting}")
    return tuple(run.timeline() for run in runs)


class _Run:
    """One program on its way."""

    def __init__(self, program: Program, keep_spans: bool) -> None:
        self._keep_spans = keep_spans
        self._tasks = program.tasks
        self._base = program.base
        self._at = 0
        self._free = {"compute": 0.0}
        self._busy = {"compute": 0.0}
        self._ends: list[float] = []
        self._spans: list[Span] = []
        self._held = dict(program.base)
        self._live = total(program.base)
        self._peak = Peak(
            num_bytes=self._live,
            holders=tuple(program.base),
            moment="between steps",
            seconds=0.0,
        )

    @property
    def done(self) -> bool:
        return self._at == len(self._tasks)

    @property
    def next(self) -> Task:
        return self._tasks[self._at]

    def advance(self, sent: dict[str, float]) -> bool:
        """Run tasks until one waits for a message; say whether any ran."""
        start = self._at
        while self._at < len(self._tasks):
            task = self._tasks[self._at]
            if task.receives is not None and task.receives not in sent:
                break
            self._run(task, sent)
            self._at += 1
        return self._at > start

    def _run(self, task: Task, sent: dict[str, float]) -> None:
        begin = self._free.get(task.stream, 0.0)
        for index in task.after:
            begin = max(begin, self._ends[index])
        if task.receives is not None:
            begin = max(begin, sent[task.receives])
        end = begin + task.seconds
        self._free[task.stream] = end
        self._busy[task.stream] = self._busy.get(task.stream, 0.0) + task.seconds
        self._ends.append(end)
        if task.sends is not None:
            sent[task.sends] = end
        worst = self._account(task, begin)
        if self._keep_spans:
            self._spans.append(
                Span(
                    label=task.label,
                    stream=task.stream,
                    start=begin,
                    end=end,
                    live=worst,
                )
            )

    def _account(self, task: Task, begin: float) -> int:
        if not task.change and not task.surge:
            return self._live
        change, rise = total(task.change), total(task.surge)
        worst = self._live + max(rise, change, 0)
        if worst > self._peak.num_bytes:
            surge = task.surge if rise >= change else task.change
            holders = dict(self._held)
            for kind, count in surge:
                holders[kind] = holders.get(kind, 0) + count
            ranked = sorted(holders.items(), key=lambda item: (-item[1], item[0]))
            self._peak = Peak(
                num_bytes=worst,
                holders=tuple((kind, count) for kind, count in ranked if count),
                moment=task.label,
                seconds=begin,
                task=self._at,
            )
        for kind, count in task.change:
            self._held[kind] = self._held.get(kind, 0) + count
        self._live += change
        return worst

    def timeline(self) -> Timeline:
        """Return what happened."""
        seconds = max(self._ends, default=0.0)
        return Timeline(
            spans=tuple(self._spans),
            base=self._base,
            peak=self._peak,
            seconds=seconds,
            busy=self._busy,
            waiting=seconds - self._busy["compute"],
        )
