"""Where the bytes of a holder come from, as a formula with its numbers."""

from __future__ import annotations

from bigmodel.models import OPTIMIZERS, ModelSpec
from bigmodel.plans import Plan
from bigmodel.units import format_count


def because(holder: str, plan: Plan, model: ModelSpec) -> str:
    """Return the formula of a holder's bytes, or what they are in words."""
    stages = f" / {plan.mesh.pipeline} stages" if plan.mesh.pipeline > 1 else ""
    weights = format_count(model.elements) + stages
    trained = format_count(model.trainable_elements) + stages
    width = plan.number_format.weight_bytes
    sharded = plan.mesh.shard > 1
    shards = f" / {plan.mesh.shard} shards" if sharded else ""
    whole = plan.zero_stage in (1, 2)
    row = OPTIMIZERS.get(plan.optimizer)
    states = f"{trained} params x {row.states} states x 4 B{shards}"
    if row.factored:
        states = f"rows and columns of the matrices of {trained} params, 4 B each"
    kept = 4 if sharded and plan.backend != "deepspeed" else width
    micro = f"micro-batch of {plan.micro_batch}"
    words = {
        "weights": f"{weights} params x {kept} B{'' if whole else shards}",
        "fp32 master weights": f"{trained} params x 4 B{shards}",
        "optimizer states": states,
        "gradients": f"of {trained} trained params, as far as they are complete",
        "activations": f"kept for backward, {micro}, "
        f"{plan.recomputed} of {len(plan.units)} units recomputed",
        "temporaries": f"inside the operators of one unit, {micro}",
        "gathered weights": "of the units in use and the one being fetched",
        "communication buckets": f"gradients on their way, {width} B an element",
        "receive buffers": f"hidden states of {plan.accumulation} micro-batches",
        "weights in autocast's precision": "bfloat16 copies of fp32 weights",
        "buffers": "of the model",
        "batch": f"{plan.local_batch} samples of {model.sample}",
        "optimizer step": "temporaries of the optimizer's step",
    }
    return words.get(holder, "")
