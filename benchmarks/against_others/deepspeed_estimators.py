"""DeepSpeed's estimators of model states, for ZeRO stages 2 and 3.

Source: `deepspeed/runtime/zero/stage_1_and_2.py` and `stage3.py`, the functions behind
`estimate_zero2_model_states_mem_needs_all_live` and stage 3's. `_all_live` prints a
table; what is called here is what it takes the model's size from and the row of it that
is the case's: no offload, all ranks on one node.

They count weights in 16 bit, gradients in 16 and 32 bit, masters and two optimizer
states in 32 bit, and for stage 3 the largest layer gathered. They do not count
activations, buckets or anything that comes and goes. They have no argument for the
number format, so in fp32 their users get the number of 16 bit.
"""

from __future__ import annotations

from deepspeed.runtime.zero import stage3, stage_1_and_2
from torch import nn

from benchmarks.against_others.estimator import Answer, Estimator, Prediction, Reason
from benchmarks.memory_accuracy.cases import MODELS, Case


def zero2_bytes(module: nn.Module, ranks: int) -> int:
    """Return the bytes of model states on a rank under stage 2."""
    _, device = stage_1_and_2.estimate_zero2_model_states_mem_needs(
        stage_1_and_2.model_to_params(module),
        num_gpus_per_node=ranks,
        cpu_offload=False,
    )
    return device


def zero3_bytes(module: nn.Module, ranks: int) -> int:
    """Return the bytes of model states on a rank under stage 3."""
    total, largest_layer = stage3.model_to_params(module)
    _, device, _ = stage3.estimate_zero3_model_states_mem_needs(
        total,
        largest_layer,
        num_gpus_per_node=ranks,
        cpu_offload=False,
        cpu_offload_params=False,
    )
    return device


_STAGES = {2: zero2_bytes, 3: zero3_bytes}


def estimate(case: Case) -> Answer:
    if case.plan.backend != "deepspeed":
        return Reason(text="for DeepSpeed's ZeRO only")
    if case.plan.zero_stage not in _STAGES:
        return Reason(text="no function for ZeRO stage 1")
    make, _, _ = MODELS[case.model]
    # Weights are told apart by their addresses, so they must be real.
    states = _STAGES[case.plan.zero_stage](make(), case.plan.mesh.shard)
    halves = case.plan.precision == "bf16"
    return Prediction(allocated=states, outside="" if halves else "no 16-bit weights")


DEEPSPEED = Estimator(
    name="DeepSpeed",
    counts="model states with 16-bit weights; no activations, no buckets",
    estimate=estimate,
)
