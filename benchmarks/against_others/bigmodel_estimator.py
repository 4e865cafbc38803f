"""bigmodel itself: trace the model, predict the plan."""

from __future__ import annotations

from benchmarks.against_others.estimator import Estimator, Prediction
from benchmarks.memory_accuracy.__main__ import costs_of
from benchmarks.memory_accuracy.cases import Case
from bigmodel.search import predict


def estimate(case: Case) -> Prediction:
    """Predict from nothing: the trace, which plans of one model share, is not kept."""
    costs_of.cache_clear()
    found = predict(case.plan, costs_of(case.model, case.plan.precision))
    return Prediction(allocated=max(rank.allocated for rank in found.ranks))


BIGMODEL = Estimator(
    name="bigmodel",
    counts="all tensors of a steady step, the library's own buffers included",
    estimate=estimate,
)
