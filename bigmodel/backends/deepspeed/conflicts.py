"""A user's own DeepSpeed configuration against what a plan says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bigmodel.backends.deepspeed.config import deepspeed_config
from bigmodel.errors import InvalidPlanError, Violation, raise_if_any
from bigmodel.plans import Plan

AUTO = "auto"
"""What transformers and accelerate fill in before DeepSpeed reads a file."""


def check_config(
    given: Mapping[str, Any],
    plan: Plan,
    *,
    clip_norm: float | None = None,
    learning_rate: float | None = None,
) -> None:
    """Compare a configuration with a plan, before any process starts.

    Args:
        given: Content of a DeepSpeed configuration file.
        plan: A plan of backend `deepspeed`.
        clip_norm: Largest global norm of the gradients; None: no clipping.
        learning_rate: That of the run; None: not compared.

    Raises:
        InvalidPlanError: Lists every conflict and every value left at 'auto', by path.
    """
    expected: dict[str, Any] = deepspeed_config(plan, clip_norm)
    expected["train_batch_size"] = plan.global_batch
    if learning_rate is not None:
        expected["optimizer"] = {"params": {"lr": learning_rate}}
    found = [*unresolved(given), *conflicts(given, expected)]
    raise_if_any(found, InvalidPlanError)


def conflicts(
    given: Mapping[str, Any], expected: Mapping[str, Any]
) -> Iterator[Violation]:
    """Yield entries that are in both and differ; '8' and 8 and 8.0 are equal."""
    wanted = dict(_leaves(expected))
    for path, value in _leaves(given):
        if value == AUTO or path not in wanted or _equal(value, wanted[path]):
            continue
        yield Violation(
            field=path,
            got=value,
            rule=f"the plan says {wanted[path]!r}",
            cure="leave it out of the configuration, or change the plan",
        )


def unresolved(given: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield entries that nobody has filled in."""
    for path, value in _leaves(given):
        if value == AUTO:
            yield Violation(
                field=path,
                got=AUTO,
                rule="DeepSpeed itself does not know 'auto'",
                cure="leave it out: the plan decides it",
            )


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from _leaves(value, here)
        else:
            yield here, value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return str(one).lower() == str(other).lower()
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return one == other
