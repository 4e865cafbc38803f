"""A rank that trains with states on a disk, and without.

    torchrun --nproc-per-node 2 worker.py FOLDER

Writes FOLDER/rankN.json: what every plan did; a traceback where it failed.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn

from bigmodel.plans import DeepSpeedOptions, Mesh, Offload, Plan, Precision
from bigmodel.running.measuring import measure_memory
from bigmodel.running.session import Engine, prepare

WIDTH = 1024
"""A weight has 4 MiB in fp32: its shards go to the disk, those of a bias do not."""
SAMPLES = 16
STEPS = 3
UNITS = ("0", "1", "2", "3", "4")
FROZEN = "2.weight"
GROUP = 524_000
"""Elements of a sub-group: the last one is too small for the disk."""

MEASURED: tuple[tuple[str, Precision], ...] = (
    ("states", "fp32"), ("states-groups", "bf16"), ("parameters", "bf16"),
    ("both", "bf16"), ("both-groups", "fp32"),
)  # fmt: skip
"""Plans whose memory is measured, and in which precision."""


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, 10),
    ]  # fmt: skip
    model = nn.Sequential(*layers)
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(samples, WIDTH, generator=generator)
    return features, torch.arange(samples) % 10


def plans(folder: Path) -> Iterator[tuple[str, Plan]]:
    """Yield plans that train alike, those without a disk first."""
    place = str(folder / "disk")
    kept = Plan(
        backend="deepspeed",
        mesh=Mesh(shard=2),
        zero_stage=3,
        units=UNITS,
        micro_batch=SAMPLES // 4,
        accumulation=2,
        # Below the elements of a weight, so that one does not fit into the bucket.
        deepspeed=DeepSpeedOptions(
            bucket_elements=1_000_000,
            param_persistence_threshold=WIDTH,
            prefetch_bucket_size=0,
        ),
    )
    grouped = replace(kept, deepspeed=replace(kept.deepspeed, sub_group_size=GROUP))
    states = Offload(optimizer="disk", folder=place)
    both = replace(states, parameters="disk")
    yield "kept", kept
    yield "cpu", replace(kept, offload=Offload(optimizer="cpu", parameters="cpu"))
    yield "states", replace(kept, offload=states)
    yield "states-groups", replace(grouped, offload=states)
    yield "parameters", replace(kept, offload=replace(both, optimizer="device"))
    yield "both", replace(kept, offload=both)
    yield "both-groups", replace(grouped, offload=both)


def prepared(plan: Plan) -> Engine:
    optimizer = partial(torch.optim.AdamW, lr=1e-3, eps=1e-6)
    return prepare(plan, network, optimizer, cross_entropy, clip_norm=0.5)


def train(engine: Engine, steps: int) -> list[float]:
    size, losses = engine.plan.local_batch, []
    begin = engine.plan.mesh.data_rank(engine.rank) * size
    for _ in range(steps):
        part = tuple(value[begin : begin + size] for value in data(SAMPLES))
        losses.append(float(engine.step(part).loss))
    return losses


def run(name: str, plan: Plan, folder: Path) -> dict[str, Any]:
    files, place = folder / name, Path(plan.offload.folder or "/nowhere")
    with prepared(plan) as engine:
        found: dict[str, Any] = {"losses": train(engine, STEPS)}
        engine.save(files)
        found["after"] = train(engine, 1)
        found["swapped"] = sorted({path.name for path in place.rglob("*.swp")})
        engine.load(files)
        found["again"] = train(engine, 1)
        engine.load(folder / "kept")
        found["from kept"] = train(engine, 1)
    found["left"] = len(list(place.glob("*")))
    for precision in ("bf16", "fp16"):
        with prepared(replace(plan, precision=precision)) as engine:
            found[precision] = train(engine, STEPS)
    with prepared(plan) as engine:
        # Before the first step there are no states yet.
        engine.load(files)
        found["fresh"] = train(engine, 1)
    for measured, precision in MEASURED:
        if measured == name:
            changed = replace(plan, precision=precision)
            found[f"memory {precision}"] = measure_memory(
                partial(prepared, changed), lambda engine: data(engine.plan.local_batch)
            ).peak
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, plan in plans(folder):
        try:
            found[name] = run(name, plan, folder)
        except Exception:
            found[name] = traceback.format_exc()
            break
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
