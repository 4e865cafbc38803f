"""The formula on the back of an envelope: states by ZeRO's stage, plus activations.

States: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", arXiv 1910.02054, section 3.1 and figure 1: weights, gradients and
optimizer states per parameter, each divided by the ranks from its stage on. FSDP2 is
stage 3.

Activations of a layer: Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models", arXiv 2205.05198: `s b h (34 + 5 a s / h)` bytes in 16 bit
(equation 2), twice that in fp32; `34 s b h` where attention does not keep its scores
(section 5; the paper recomputes them, flash attention never writes them); `2 s b h`
where everything is recomputed (table 2).

Not counted: logits and loss, what comes and goes in the backward, the one block that is
recomputed at a time, buckets and gathered weights. There is no formula for the MLP's
activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import GPT2LMHeadModel

from benchmarks.against_others.estimator import Estimator, Prediction
from benchmarks.memory_accuracy.cases import MODELS, SEQUENCE, Case
from bigmodel.plans import Plan, Precision

_STATES: dict[Precision, tuple[int, int, int]] = {
    "fp32": (4, 4, 8),
    "autocast": (4, 4, 8),
    "bf16": (2, 2, 12),
}
"""Bytes per parameter of weights, gradients, and optimizer states with masters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """What the activation formula needs."""

    layers: int
    hidden: int
    heads: int
    sequence: int


def state_bytes(
    params: int, precision: Precision, *, stage: int = 0, ranks: int = 1
) -> int:
    """Return weights, gradients and optimizer states of a rank.

    Args:
        params: Parameters of the model.
        precision: Says the bytes of each.
        stage: Of ZeRO; 0: nothing is sharded.
        ranks: That share what is sharded.
    """
    weights, gradients, optimizer = _STATES[precision]
    per_param = (
        weights / (ranks if stage >= 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + optimizer / (ranks if stage >= 1 else 1)
    )
    return round(params * per_param)


def activation_bytes(
    model: Transformer,
    batch: int,
    precision: Precision,
    *,
    flash: bool = False,
    recomputed: bool = False,
) -> int:
    """Return what all layers keep for the backward of one micro-batch.

    Args:
        model: The layers.
        batch: Samples of the micro-batch.
        precision: 16 bit, or fp32 at twice the bytes.
        flash: Whether attention keeps no scores.
        recomputed: Whether layers keep only their inputs.
    """
    per_element = 34.0
    if recomputed:
        per_element = 2.0
    elif not flash:
        per_element += 5 * model.heads * model.sequence / model.hidden
    elements = model.sequence * batch * model.hidden * model.layers
    return round(elements * per_element * (2 if precision == "fp32" else 1))


def estimate(case: Case, *, flash: bool) -> Prediction:
    make, _, _ = MODELS[case.model]
    with torch.device("meta"):
        module = make()
    plan = case.plan
    states = state_bytes(
        sum(weight.numel() for weight in module.parameters()),
        plan.precision,
        stage=3 if plan.backend == "fsdp2" else plan.zero_stage,
        ranks=plan.world,
    )
    shape = _shape(module)
    if shape is None:
        return Prediction(allocated=states, outside="no formula for activations")
    kept = activation_bytes(
        shape,
        plan.micro_batch,
        plan.precision,
        flash=flash,
        recomputed=_recomputed(plan),
    )
    return Prediction(allocated=states + kept)


def _shape(module: nn.Module) -> Transformer | None:
    if not isinstance(module, GPT2LMHeadModel):
        return None
    return Transformer(
        layers=module.config.n_layer,
        hidden=module.config.n_embd,
        heads=module.config.n_head,
        sequence=SEQUENCE,
    )


def _recomputed(plan: Plan) -> bool:
    return "full" in plan.recompute


TEXTBOOK = Estimator(
    name="textbook",
    counts="states by ZeRO's stage, s b h (34 + 5 a s / h) a layer; no buffers",
    estimate=partial(estimate, flash=False),
)
TEXTBOOK_FLASH = Estimator(
    name="textbook flash",
    counts="the same with 34 s b h a layer: attention keeps no scores",
    estimate=partial(estimate, flash=True),
)
