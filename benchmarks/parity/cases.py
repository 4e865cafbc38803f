"""What is compared with one process.

Every layout of `benchmarks.layouts` x model x recompute policy x precision x options.
All cases of one world size run in one launch. Tests take a part of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.layouts import all_layouts
from benchmarks.parity.models import SUBJECTS
from bigmodel.backends.backend import refusals
from bigmodel.backends.catalog import BACKENDS
from bigmodel.plans import Plan

STEPS = 5
WORLDS = (1, 2, 4)
GLOBAL_BATCH = 8
EXACT = 1e-5
"""Largest difference of losses and weights in fp32."""
HALF = 3e-2
"""The same of losses where numbers are rounded to half precision, or gradients travel
compressed; norms and weights are not compared."""


@dataclass(frozen=True)
class Case:
    """One plan for one model, and what is done with it."""

    name: str
    plan: Plan
    model: str
    clip_norm: float | None = None
    freeze: bool = False
    resume: bool = False
    """Also save, load into a fresh engine and go on."""
    tolerance: float = EXACT
    """Largest difference of losses; of weights in fp32."""
    exact: bool = True
    """Whether norms and weights are compared too."""
    groups: bool = False
    """Give an optimizer with two groups, not a factory."""
    quick: bool = False
    """Whether the tests take it."""


def cases(world: int, *, quick: bool = False) -> list[Case]:
    """Return the cases of a world size; quick: those that the tests take."""
    found = [
        case
        for model in SUBJECTS
        for name, plan in all_layouts(
            world, SUBJECTS[model].units, SUBJECTS[model].elements
        )
        for case in _of(f"{name}-{model}", model, plan)
    ]
    return [case for case in found if case.quick or not quick]


def _of(name: str, model: str, plan: Plan) -> Iterator[Case]:
    least = plan.accumulation
    precisions = BACKENDS.get(plan.backend).precisions
    rounds = plan.ddp.hook != "none" or plan.horovod.compression != "none"
    plain = Case(
        name=name,
        plan=_sized(plan, least),
        model=model,
        tolerance=HALF if rounds else EXACT,
        exact=not rounds,
    )
    most = _sized(plan, max(4, least))
    if list(refusals(BACKENDS.get(plan.backend), most)):
        most = plain.plan
    everything = replace(plain, plan=_recomputed(most), clip_norm=0.1, freeze=True)
    yield replace(
        plain, name=f"{name}-plain", quick=model == "mlp" and not plan.compile
    )
    if (recomputed := _recomputed(plain.plan)) != plain.plan:
        yield replace(plain, name=f"{name}-recompute", plan=recomputed)
    yield replace(plain, name=f"{name}-clip", plan=most, clip_norm=0.1)
    # Compiling takes its time: the tests do it once, for the case with most in it.
    dear = plan.compile and plan.backend != "ddp"
    yield replace(
        everything,
        name=f"{name}-everything",
        resume=True,
        quick=model == "gpt2" and not dear,
    )
    yield replace(everything, name=f"{name}-groups", groups=True)
    if model != "gpt2":
        return
    for precision in precisions:
        half = replace(most, precision=precision)
        if precision == "fp32" or list(refusals(BACKENDS.get(plan.backend), half)):
            continue
        yield replace(
            everything,
            name=f"{name}-{precision}",
            plan=half,
            freeze=False,
            tolerance=HALF,
            exact=False,
            # The tests take it where it differs: not once more with more ranks.
            quick=precision == "bf16" and not plan.compile and plan.world < 4,
        )


def _sized(plan: Plan, accumulation: int) -> Plan:
    """Return the plan for the global batch of the matrix, or the next it can have."""
    share = GLOBAL_BATCH // plan.mesh.data_parallel // accumulation
    return replace(plan, micro_batch=max(1, share), accumulation=accumulation)


def _recomputed(plan: Plan) -> Plan:
    """Return the plan with all recomputed, or as it is where that is refused."""
    full = replace(plan, recompute=("full",) * len(plan.units))
    return plan if list(refusals(BACKENDS.get(plan.backend), full)) else full
