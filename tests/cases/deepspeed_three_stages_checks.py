"""DeepSpeed's pipeline engine with a stage that is neither first nor last."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bigmodel
from benchmarks.memory_accuracy.__main__ import CLUSTER
from bigmodel.plans import DeepSpeedOptions, Mesh, Plan, Stages
from bigmodel.running.measuring import measure_memory
from bigmodel.running.session import prepare
from bigmodel.search import predict
from bigmodel.simulator import Costs

WIDTH, LAYERS, STAGES = 256, 6, 3
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-6)
PLAN = Plan(
    backend="deepspeed_pipeline",
    mesh=Mesh(pipeline=STAGES),
    units=tuple(map(str, range(2 * LAYERS))),
    stages=Stages(schedule="1f1b", cuts=(4, 8)),
    micro_batch=4,
    accumulation=4,
)
ZERO = replace(PLAN, zero_stage=1, deepspeed=DeepSpeedOptions(bucket_elements=100_000))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def cross_entropy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.float(), batch[1])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(16, WIDTH, generator=generator), torch.arange(16)


def pp_08_three_stages_train_as_one_process() -> None:
    alone = layers()
    optimizer, expected = ADAMW(alone.parameters()), []
    for _ in range(3):
        loss = cross_entropy(alone(batch()[0]), batch())
        expected.append(float(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    half = replace(ZERO, precision="bf16")
    for plan, bound in ((PLAN, 1e-5), (ZERO, 1e-5), (half, 3e-2)):
        with prepare(plan, layers(), ADAMW, cross_entropy) as engine:
            losses = [float(engine.step(batch()).loss) for _ in range(3)]
            state = engine.state_dict()
        torch.testing.assert_close(losses, expected, rtol=0, atol=bound)
        if dist.get_rank() == 0:
            for name, value in alone.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=bound)


def pp_08_every_stage_of_three_is_predicted() -> None:
    cluster = replace(CLUSTER, node=replace(CLUSTER.node, count=STAGES))
    for plan in (PLAN, ZERO, replace(ZERO, precision="bf16")):
        measured = measure_memory(
            lambda plan=plan: prepare(plan, layers(), ADAMW, cross_entropy),
            lambda _: batch(),
        )
        spec = bigmodel.trace(
            layers, batch(), precision=plan.precision, target="cpu", loss=cross_entropy
        )
        found = predict(plan, Costs(spec, cluster)).of_rank(dist.get_rank())
        assert abs(found.allocated / measured.peak - 1) < 5e-3
