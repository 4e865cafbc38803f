"""Decisions and estimates as plain data for JSON: bytes are int, seconds float."""

from __future__ import annotations

from typing import Any

from bigmodel.plans import document
from bigmodel.reports.rejections import group_rejected
from bigmodel.search.prediction import Decision, Estimate, RankMemory

FORMAT = 1
"""Version of these documents; keys are only added within one version."""


def decision_document(decision: Decision) -> dict[str, Any]:
    """Return a decision; rejected plans are counted by reason, with an example each."""
    return {
        "format": FORMAT,
        "model": decision.model,
        "cluster": decision.cluster,
        "global_batch": decision.global_batch,
        "considered": decision.considered,
        "simulated": decision.simulated,
        "best": estimate_document(decision.best),
        "runners_up": [estimate_document(entry) for entry in decision.runners_up],
        "rejected": [
            {
                "reason": group.reason,
                "count": group.count,
                "example": document.to_dict(group.example.plan),
            }
            for group in group_rejected(decision.rejected)
        ],
    }


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate with its plan; timelines are left out."""
    return {
        "format": FORMAT,
        "plan": document.to_dict(estimate.plan),
        "digest": document.digest(estimate.plan),
        "description": estimate.plan.describe(),
        "fits": estimate.fits,
        "capacity_bytes": estimate.capacity,
        "low_bytes": estimate.low,
        "high_bytes": estimate.high,
        "missing_bytes": estimate.missing,
        "seconds": estimate.seconds,
        "compute_seconds": estimate.compute_seconds,
        "exposed_seconds": estimate.exposed_seconds,
        "tokens_per_second_per_gpu": estimate.tokens_per_second_per_gpu,
        "mfu": estimate.mfu,
        "fullest_stage": estimate.fullest.stage,
        "stages": [_rank(rank) for rank in estimate.ranks],
    }


def _rank(rank: RankMemory) -> dict[str, Any]:
    return {
        "stage": rank.stage,
        "peak_allocated_bytes": rank.allocated,
        "peak_reserved_bytes": rank.reserved,
        "device_total_bytes": rank.device_total,
        "moment": rank.moment,
        "terms": [
            {"name": t.name, "bytes": t.num_bytes, "because": t.because}
            for t in rank.terms
        ],
    }
