"""What is compared with one process: add a backend's cases here, one line each.

All cases of one world size run in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bigmodel.plans import Buckets, Mesh, Plan, Stages
from tests.parity.models import SUBJECTS

STEPS = 5


@dataclass(frozen=True)
class Case:
    name: str
    plan: Plan
    model: str
    clip_norm: float | None
    freeze: bool
    resume: bool
    """Also save, load into a fresh engine and go on."""
    tolerance: float
    """Largest difference of losses; of weights in fp32."""
    instance: bool
    """Give an optimizer with two groups, not a factory."""


def case(
    name: str,
    model: str = "gpt2",
    *,
    backend: str,
    mesh: Mesh,
    clip_norm: float | None = None,
    freeze: bool = False,
    recompute: bool = False,
    resume: bool = False,
    tolerance: float = 1e-5,
    instance: bool = False,
    accumulation: int = 1,
    micro_batch: int = 0,
    **plan: Any,
) -> Case:
    """Return a case; unless told otherwise the global batch is 8 samples."""
    units = SUBJECTS[model].units
    return Case(
        name=name,
        plan=Plan(
            backend=backend,
            mesh=mesh,
            micro_batch=micro_batch or max(1, 8 // mesh.data_parallel // accumulation),
            accumulation=accumulation,
            units=units,
            recompute=("full",) * len(units) if recompute else (),
            **plan,
        ),
        model=model,
        clip_norm=clip_norm,
        freeze=freeze,
        resume=resume,
        tolerance=tolerance,
        instance=instance,
    )


# Buckets small enough that there are several of them.
DDP: dict[str, Any] = {
    "backend": "ddp",
    "buckets": Buckets(ddp_megabytes=0.01, ddp_gradient_views=True),
}
COPIES: dict[str, Any] = {
    "backend": "ddp",
    "buckets": Buckets(ddp_megabytes=0.01, ddp_gradient_views=False),
}
FSDP: dict[str, Any] = {"backend": "fsdp2"}
KEEP: dict[str, Any] = {"backend": "fsdp2", "reshard_after_forward": False}


def zero(stage: int) -> dict[str, Any]:
    buckets = Buckets(deepspeed_elements=20_000)
    return {"backend": "deepspeed", "zero_stage": stage, "buckets": buckets}


def pipe(schedule: str, *cuts: int) -> dict[str, Any]:
    buckets = Buckets(ddp_megabytes=0.01)
    stages = Stages(schedule=schedule, cuts=cuts)
    return {"backend": "pipeline", "stages": stages, "buckets": buckets}


R2, R4 = Mesh(replicate=2), Mesh(replicate=4)
S2, S4 = Mesh(shard=2), Mesh(shard=4)
HYBRID = Mesh(replicate=2, shard=2)
P2, P4 = Mesh(pipeline=2), Mesh(pipeline=4)
P2R2, P2S2 = Mesh(pipeline=2, replicate=2), Mesh(pipeline=2, shard=2)

ALL: dict[str, Any] = {
    "accumulation": 4,
    "clip_norm": 0.1,
    "freeze": True,
    "recompute": True,
}
# In bfloat16 losses are compared with fp32, roughly, and weights are not.
BF16: dict[str, Any] = {"precision": "bf16", "clip_norm": 0.1, "tolerance": 3e-2}
AUTOCAST: dict[str, Any] = {"precision": "autocast", "tolerance": 3e-2}

# Every way of spreading a model, by world size: the fp32 matrix runs all of them.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {"mesh": R2, **DDP},
        "ddp-copies": {"mesh": R2, **COPIES},
        "fsdp2": {"mesh": S2, **FSDP},
        "fsdp2-keep": {"mesh": S2, **KEEP},
        **{f"zero{stage}": {"mesh": S2, **zero(stage)} for stage in (1, 2, 3)},
        "gpipe": {"mesh": P2, **pipe("gpipe", 2)},
        "1f1b": {"mesh": P2, **pipe("1f1b", 2)},
    },
    4: {
        "ddp": {"mesh": R4, **DDP},
        "fsdp2": {"mesh": S4, **FSDP},
        "hybrid": {"mesh": HYBRID, **FSDP},
        **{f"zero{stage}": {"mesh": S4, **zero(stage)} for stage in (1, 2, 3)},
        "gpipe": {"mesh": P4, **pipe("gpipe", 1, 2, 3)},
        "1f1b": {"mesh": P4, **pipe("1f1b", 1, 2, 3)},
        "1f1b-ddp": {"mesh": P2R2, **pipe("1f1b", 2)},
        "1f1b-fsdp2": {"mesh": P2S2, **pipe("1f1b", 2)},
    },
}


def matrix(world: int) -> Iterator[Case]:
    """Yield every layout x model x recompute policy, plain and with all options."""
    for label, layout in LAYOUTS[world].items():
        # torch's 1F1B needs a micro-batch for every stage.
        least = layout["mesh"].pipeline if label.startswith("1f1b") else 1
        variants = {
            "plain": {"accumulation": least},
            "options": {"accumulation": 4, "clip_norm": 0.1, "freeze": True},
        }
        for model in ("gpt2", "mlp"):
            for policy in ("none", "full"):
                for variant, options in variants.items():
                    yield case(
                        f"{label}-{model}-{policy}-{variant}",
                        model,
                        recompute=policy == "full",
                        **options,
                        **layout,
                    )


# fmt: off
CASES: dict[int, list[Case]] = {
    2: [
        *matrix(2),
        case("ddp", mesh=R2, resume=True, **DDP),
        case("ddp-groups", mesh=R2, instance=True, freeze=True, **DDP),
        case("ddp-copies", mesh=R2, accumulation=4, clip_norm=0.1, **COPIES),
        case("ddp-bf16", mesh=R2, resume=True, **BF16, **DDP),
        case("ddp-autocast", mesh=R2, **AUTOCAST, **DDP),
        case("fsdp2", mesh=S2, resume=True, **FSDP),
        case("fsdp2-groups", mesh=S2, instance=True, freeze=True, resume=True, **FSDP),
        case("fsdp2-keep", mesh=S2, accumulation=4, clip_norm=0.1, **KEEP),
        case("fsdp2-bf16", mesh=S2, **BF16, **FSDP),
        case("fsdp2-autocast", mesh=S2, **AUTOCAST, **FSDP),
        case("zero1", mesh=S2, resume=True, **zero(1)),
        case("zero2", mesh=S2, resume=True, **zero(2)),
        case("zero3", mesh=S2, resume=True, **zero(3)),
        case("zero2-groups", mesh=S2, instance=True, freeze=True, **zero(2)),
        case("zero2-bf16", mesh=S2, **BF16, **zero(2)),
        case("zero3-bf16", mesh=S2, **BF16, **zero(3)),
        case("zero2-autocast", mesh=S2, **AUTOCAST, **zero(2)),
        case("1f1b", mesh=P2, accumulation=4, resume=True, **pipe("1f1b", 2)),
        case("1f1b-8", mesh=P2, accumulation=8, clip_norm=0.1, **pipe("1f1b", 1)),
        case("1f1b-groups", mesh=P2, accumulation=2, instance=True, freeze=True,
             resume=True, **pipe("1f1b", 2)),
        case("1f1b-bf16", mesh=P2, accumulation=4, resume=True, **BF16,
             **pipe("1f1b", 2)),
        case("1f1b-autocast", mesh=P2, accumulation=4, **AUTOCAST, **pipe("1f1b", 2)),
        case("gpipe", mesh=P2, accumulation=4, clip_norm=0.1, **pipe("gpipe", 2)),
        case("gpipe-1", mesh=P2, recompute=True, **pipe("gpipe", 3)),
        case("gpipe-8", mesh=P2, accumulation=8, **pipe("gpipe", 2)),
    ],
    4: [
        *matrix(4),
        case("ddp", mesh=R4, accumulation=2, clip_norm=0.1, **DDP),
        case("fsdp2", mesh=S4, clip_norm=0.1, **FSDP),
        case("hybrid", mesh=HYBRID, resume=True, **FSDP),
        case("hybrid-keep", mesh=HYBRID, accumulation=2, clip_norm=0.1, **KEEP),
        case("zero2", mesh=S4, clip_norm=0.1, **zero(2)),
        case("zero3", mesh=S4, accumulation=2, clip_norm=0.1, **zero(3)),
        case("pipe-ddp", mesh=P2R2, resume=True, **ALL, **pipe("1f1b", 2)),
        case("pipe-ddp-gpipe", mesh=P2R2, accumulation=4, **pipe("gpipe", 2)),
        case("pipe-ddp-8", mesh=P2R2, accumulation=8, clip_norm=0.1,
             **pipe("1f1b", 2)),
        case("pipe-ddp-bf16", mesh=P2R2, accumulation=4, **BF16, **pipe("1f1b", 2)),
        case("pipe-fsdp2", mesh=P2S2, resume=True, **ALL, **pipe("1f1b", 2)),
        case("pipe-fsdp2-gpipe", mesh=P2S2, accumulation=4, **pipe("gpipe", 2)),
        case("pipe-fsdp2-keep", mesh=P2S2, accumulation=8, clip_norm=0.1,
             reshard_after_forward=False, **pipe("1f1b", 2)),
        case("pipe-fsdp2-groups", mesh=P2S2, accumulation=2, instance=True,
             resume=True, **pipe("1f1b", 2)),
        case("pipe-fsdp2-bf16", mesh=P2S2, accumulation=4, **BF16, **pipe("1f1b", 2)),
    ],
}
# fmt: on
