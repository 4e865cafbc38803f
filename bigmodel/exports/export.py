"""What is asked of an exporter, and what it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bigmodel.exports.placement import Placement
from bigmodel.plans import Plan

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One plan for one tool."""

    plan: Plan
    plan_path: str
    """Path of the plan file, as the processes will find it."""
    placement: Placement
    """Machines and processes of each."""
    script: str = "train.py"
    arguments: tuple[str, ...] = ()
    """Of the script."""
    out: Path | None = None
    """Where the text goes; None: to stdout, so that no second file can lie beside."""
    device: Device = "cuda"
    clip_norm: float | None = None
    """Largest global norm of the gradients; None: no clipping."""
    image: str | None = None
    """Container image, where the tool needs one."""

    def beside(self, suffix: str) -> str | None:
        """Return the name of a second file beside the first."""
        return None if self.out is None else str(self.out.with_suffix(suffix))


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What an exporter wrote."""

    text: str
    """The file or the command."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Further files that the text names: from path to text."""
    notes: tuple[str, ...] = ()
    """What the reader must know: how to use it, and what the tool cannot be told."""
