"""Plans as JSON: written, read, and recognised by their digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bigmodel.errors import PlanFileError, Violation
from bigmodel.plans.training_plan import Plan

FORMAT = 2
"""Version of the plan file; files of another version are refused."""

_ADAPTER = TypeAdapter(Plan)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data."""
    return asdict(plan)


def digest(plan: Plan) -> str:
    """Return 16 hexadecimal digits that are equal only for equal plans."""
    canonical = json.dumps(to_dict(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def save(plan: Plan, path: str | Path, **context: Any) -> Path:
    """Write a plan file; `context` (model, cluster, prediction) is kept for readers.

    Returns:
        The path that was written.
    """
    path = Path(path)
    document = {"format": FORMAT, "plan": to_dict(plan), **context}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def load(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanFileError: There is no such file, it is damaged, or of another version.
        InvalidPlanError: The plan in it can never be right.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise PlanFileError(
            f"there is no plan file {str(path)!r}; "
            "write one with: bigmodel plan MODEL --out plan.json"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanFileError(
            f"{str(path)!r} is damaged: {error}; write it again with bigmodel plan"
        ) from None
    return from_document(document, str(path))


def from_document(document: object, source: str) -> Plan:
    """Read the plan in a parsed plan file; `source` names it in errors."""
    if not isinstance(document, dict) or "plan" not in document:
        raise PlanFileError(
            f"{source!r} is no plan file: it has no entry 'plan'; "
            "write one with: bigmodel plan MODEL --out plan.json"
        )
    if document.get("format") != FORMAT:
        raise PlanFileError(
            Violation(
                field=f"format of {source!r}",
                got=document.get("format"),
                rule=f"this version of bigmodel reads plan files of format {FORMAT}",
                cure="plan again with this version",
            )
        )
    return from_dict(document["plan"], source)


def from_dict(data: object, source: str = "plan") -> Plan:
    """Build a plan from plain data, refusing unknown fields and wrong types."""
    unknown = _unknown_fields(data, source)
    try:
        plan = _ADAPTER.validate_python(data, strict=False)
    except ValidationError as error:
        found = [
            Violation(
                field=".".join((source, *map(str, item["loc"]))),
                got=item["input"],
                rule=item["msg"][0].lower() + item["msg"][1:],
            )
            for item in error.errors()
        ]
        raise PlanFileError(unknown + found) from None
    if unknown:
        raise PlanFileError(unknown)
    return plan


def _unknown_fields(data: object, source: str, kind: type = Plan) -> list[Violation]:
    if not isinstance(data, dict):
        return []
    known = {entry.name: entry for entry in fields(kind)}
    found = []
    for name, value in data.items():
        if name not in known:
            found.append(
                Violation(
                    field=f"{source}.{name}",
                    got=value,
                    rule="a plan has no such field",
                    cure=f"known fields: {', '.join(known)}",
                )
            )
            continue
        default = known[name].default_factory
        if is_dataclass(default) and isinstance(default, type):
            found += _unknown_fields(value, f"{source}.{name}", default)
    return found
