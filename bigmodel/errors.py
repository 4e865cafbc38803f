"""Everything that bigmodel raises on purpose.

BigModelError                       exit code 1
├── UsageError                      2  the user can mend it; carries all violations
│   ├── UnknownNameError               a name that no table has; lists known ones
│   ├── InvalidPlanError               a plan that can never be right
│   ├── PlanFileError                  a plan file that is no plan
│   ├── InvalidClusterError            a cluster that cannot exist
│   ├── TracingError                   a model that could not be read
│   ├── MissingDependencyError         an optional library that is not installed
│   └── WorldError                     the processes do not match the plan
├── NothingFitsError                3  no plan fits the cluster
├── OutOfMemoryError                4  memory ran out while training
└── WorkerError                     1  a process died or never answered
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule, said so that it can be mended."""

    field: str
    """What is wrong, as the user would write it: `micro_batch`, `--cluster`."""
    got: object
    """The value that was given."""
    rule: str
    """The rule it breaks, in one clause."""
    cure: str = ""
    """What to write instead."""

    def __str__(self) -> str:
        text = f"{self.field} is {self.got!r}; {self.rule}"
        return f"{text}; {self.cure}" if self.cure else text


class BigModelError(Exception):
    """Base of all errors of this library."""

    exit_code = 1


class UsageError(BigModelError):
    """The user can mend it.

    Args:
        problem: One sentence, or every broken rule.
    """

    exit_code = 2

    def __init__(self, problem: str | Violation | Sequence[Violation]) -> None:
        if isinstance(problem, Violation):
            problem = (problem,)
        self.violations: tuple[Violation, ...] = (
            () if isinstance(problem, str) else tuple(problem)
        )
        text = problem if isinstance(problem, str) else "\n".join(map(str, problem))
        super().__init__(text)


class UnknownNameError(UsageError):
    """A name that no table has."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = " or ".join(map(repr, _near(name, names)))
        hint = f" (did you mean {near}?)" if near else ""
        super().__init__(f"no {kind} named {name!r}{hint}; known: {', '.join(names)}")


def _near(name: str, names: Sequence[str]) -> list[str]:
    """Return the names that begin with this one, or else the most similar one."""
    by_lower = {known.lower(): known for known in names}
    wanted = name.strip().lower()
    begun = [known for lower, known in by_lower.items() if lower.startswith(wanted)]
    if wanted and begun:
        return begun
    return [by_lower[n] for n in difflib.get_close_matches(wanted, by_lower, n=1)]


class InvalidPlanError(UsageError):
    """A plan that can never be right."""


class PlanFileError(UsageError):
    """A plan file that cannot be read as a plan."""


class InvalidClusterError(UsageError):
    """A cluster that cannot exist."""


class TracingError(UsageError):
    """A model that could not be read without running it."""


class MissingDependencyError(UsageError):
    """An optional library that is not installed.

    Args:
        library: Its name.
        extra: The extra of this package that brings it.
        purpose: What needs it.
        cure: What to do where no extra can bring it.
    """

    def __init__(
        self, library: str, extra: str, purpose: str, *, cure: str = ""
    ) -> None:
        cure = cure or f'run: pip install "bigmodel[{extra}]"'
        super().__init__(f"{purpose} needs {library}, which is not installed; {cure}")


class WorldError(UsageError):
    """The processes that were started do not match the plan."""


class NothingFitsError(BigModelError):
    """No plan fits the cluster; the message says by how much and what would help."""

    exit_code = 3


class OutOfMemoryError(BigModelError):
    """Memory ran out while training."""

    exit_code = 4


class WorkerError(BigModelError):
    """A process of the job died or did not answer in time."""


def raise_if_any(
    violations: Sequence[Violation], error: type[UsageError] = UsageError
) -> None:
    """Raise `error` with all violations at once, or return when there are none."""
    if violations:
        raise error(violations)
