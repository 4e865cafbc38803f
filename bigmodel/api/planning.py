"""Choosing a plan and predicting one: the public functions `plan` and `estimate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bigmodel.api.clusters import cluster as read_cluster
from bigmodel.api.collection import collection_paused
from bigmodel.api.tracing import trace
from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.engine import LossFunction
from bigmodel.clusters import Cluster
from bigmodel.errors import InvalidPlanError, UsageError, Violation, raise_if_any
from bigmodel.models import ModelSpec
from bigmodel.plans import Plan, Precision
from bigmodel.running.plan_argument import as_plan
from bigmodel.search import Decision, Estimate, decide, predict
from bigmodel.search.measures import find_measures
from bigmodel.search.rules import dtype_violations
from bigmodel.simulator import Costs


def plan(
    model: object,
    batch: Any = None,
    *,
    cluster: str | Cluster | None = None,
    global_batch: int,
    optimizer: str = "adamw",
    precision: Precision = "bf16",
    seq_len: int | None = None,
    loss: LossFunction | None = None,
    backends: Sequence[str] | None = None,
) -> Decision:
    """Choose the fastest way of training a model that fits a cluster.

        decision = bigmodel.plan("llama-3-8b", cluster="8xH100-80GB",
                                 global_batch=64, seq_len=8192)
        print(decision)

    Args:
        model: Whatever `trace` reads, or a ModelSpec that it returned.
        batch: A sample batch; may be left out as for `trace`.
        cluster: Whatever `cluster` reads; None: this job's machine.
        global_batch: Samples per optimizer step over all devices.
        optimizer: Name in the table of optimizers.
        precision: `bf16`, `fp32` or `autocast`.
        seq_len: Tokens of a sample, where `batch` is left out.
        loss: `loss(output, batch)`, where the model does not return its loss itself.
        backends: Names of the backends to consider; None: all.

    Raises:
        UsageError: Something given is wrong; says what, and the cure.
        NothingFitsError: No plan fits; says by how much and what would help.
    """
    where = read_cluster(cluster)
    _check(global_batch, precision, where, backends)
    spec = _spec(model, batch, where, precision, seq_len, loss)
    with collection_paused():
        return decide(
            spec,
            where,
            global_batch=global_batch,
            optimizer=optimizer,
            precision=precision,
            backends=backends,
        )


def estimate(
    model: object,
    batch: Any = None,
    *,
    plan: Plan | Decision | str,
    cluster: str | Cluster | None = None,
    seq_len: int | None = None,
    loss: LossFunction | None = None,
    measures: bool = False,
) -> Estimate:
    """Predict memory and time of one plan.

        estimate = bigmodel.estimate("llama-3-8b", plan="plan.json",
                                     cluster="8xH100-80GB", seq_len=8192)
        estimate.of_rank(3).units       # who holds what at the peak of rank 3

    Args:
        model: Whatever `trace` reads, or a ModelSpec that it returned.
        batch: A sample batch; may be left out as for `trace`.
        plan: A Plan, a Decision or the path of a plan file. A plan without units takes
            those of the model.
        cluster: Whatever `cluster` reads; None: this job's machine.
        seq_len: Tokens of a sample, where `batch` is left out.
        loss: `loss(output, batch)`, where the model does not return its loss itself.
        measures: Whether to predict also what would save memory. Other precisions are
            tried where the model can be traced again: not of a ModelSpec.

    Raises:
        UsageError: Something given is wrong, or the plan breaks a rule for this model
            and cluster; lists every violation.
    """
    chosen = as_plan(plan)
    return estimate_chosen(
        model,
        batch,
        choose=lambda costs: chosen,
        precision=chosen.precision,
        cluster=cluster,
        seq_len=seq_len,
        loss=loss,
        measures=measures,
    )


def estimate_chosen(
    model: object,
    batch: Any = None,
    *,
    choose: Callable[[Costs], Plan],
    precision: Precision,
    cluster: str | Cluster | None = None,
    seq_len: int | None = None,
    loss: LossFunction | None = None,
    measures: bool = False,
) -> Estimate:
    """Predict a plan that is made once the model's costs are known.

    Args:
        model: As for `estimate`, and so are those not named here.
        batch: A sample batch.
        choose: Returns the plan.
        precision: That of the plan.
        cluster: Where it is to run.
        seq_len: Tokens of a sample.
        loss: Of output and batch.
        measures: Whether to predict also what would save memory.
    """
    where = read_cluster(cluster)

    def traced(wanted: Precision) -> Costs:
        return Costs(_spec(model, batch, where, wanted, seq_len, loss), where)

    costs = traced(precision)
    chosen = choose(costs)
    if not chosen.units:
        chosen = replace(chosen, units=costs.model.units)
    with collection_paused():
        found = predict(chosen, costs)
        if not measures:
            return found
        again = None if isinstance(model, ModelSpec) else traced
        return replace(found, measures=find_measures(found, costs, retraced=again))


def _spec(
    model: object,
    batch: Any,
    where: Cluster,
    precision: Precision,
    seq_len: int | None,
    loss: LossFunction | None,
) -> ModelSpec:
    target = where.device.kind
    if not isinstance(model, ModelSpec):
        return trace(
            model, batch, seq_len=seq_len, precision=precision, target=target, loss=loss
        )
    if model.target != target:
        raise UsageError(
            Violation(
                field="model",
                got=f"{model.name}, traced for {model.target}",
                rule=f"{where.name} has {target} devices",
                cure=f"trace it with target={target!r}",
            )
        )
    return model


def _check(
    global_batch: int,
    precision: Precision,
    where: Cluster,
    backends: Sequence[str] | None,
) -> None:
    """Refuse what can be refused before a model is traced, all of it at once."""
    found: list[Violation] = []
    if not isinstance(global_batch, int) or global_batch < 1:
        found.append(
            Violation(
                field="global_batch",
                got=global_batch,
                rule="it must be a whole number of at least 1",
            )
        )
    found += dtype_violations(precision, where)
    raise_if_any(found, InvalidPlanError)
    for name in backends or ():
        BACKENDS.get(name)
