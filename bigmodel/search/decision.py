"""What the search decided, and what became of the plans that were not chosen."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigmodel.plans import Plan, document
from bigmodel.search.prediction import FORMAT, Estimate
from bigmodel.search.rejections import Rejected, group_rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The fastest plan that fits, and what became of the others."""

    model: str
    """The model in words."""
    cluster: str
    """The cluster in words."""
    global_batch: int
    best: Estimate
    runners_up: tuple[Estimate, ...]
    """The next fastest plans that fit."""
    rejected: tuple[Rejected, ...]
    considered: int
    """Plans that were enumerated."""
    simulated: int
    """Plans that were simulated; the others were ruled out by a bound or a rule."""

    @property
    def plan(self) -> Plan:
        """The plan that was chosen."""
        return self.best.plan

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; rejected plans are counted by reason."""
        return {
            "format": FORMAT,
            "model": self.model,
            "cluster": self.cluster,
            "global_batch": self.global_batch,
            "considered": self.considered,
            "simulated": self.simulated,
            "best": self.best.to_dict(),
            "runners_up": [estimate.to_dict() for estimate in self.runners_up],
            "rejected": [
                {
                    "reason": group.reason,
                    "count": group.count,
                    "example": document.to_dict(group.example.plan),
                }
                for group in group_rejected(self.rejected)
            ],
        }

    def to_json(self) -> str:
        """Return `to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | Path) -> Path:
        """Write the plan file, with what was predicted beside the plan."""
        return document.save(
            self.plan,
            path,
            model=self.model,
            cluster=self.cluster,
            predicted={
                "seconds": self.best.seconds,
                "tokens_per_second_per_gpu": self.best.tokens_per_second_per_gpu,
                "peak_allocated_bytes": self.best.fullest.allocated,
                "peak_reserved_bytes": self.best.fullest.reserved,
                "device_total_bytes": self.best.fullest.device_total,
            },
        )

    def accelerator(self, **keywords: Any) -> Any:
        """Return the chosen plan as an `Accelerator`: `bigmodel.accelerator`."""
        # By name: planning knows no torch, and nothing above it.
        exporting = importlib.import_module("bigmodel.api.exporting")
        return exporting.accelerator(self.plan, **keywords)

    def __str__(self) -> str:
        lines = [
            f"{self.model} on {self.cluster}, global batch {self.global_batch}",
            f"  best       {self.best}",
            *(f"  runner-up  {estimate}" for estimate in self.runners_up),
            f"  {self.considered} plans considered, {self.simulated} simulated, "
            f"{len(self.rejected)} rejected",
        ]
        return "\n".join(lines)
