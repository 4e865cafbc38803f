"""Random numbers of a rank: where they begin, and where a checkpoint goes on."""

from __future__ import annotations

from typing import Any

import torch

from bigmodel.plans import Plan


def seed_of_rank(plan: Plan, rank: int, seed: int) -> int:
    """Return where a rank's random numbers begin: no two ranks draw the same ones.

    The first stage of data-parallel rank r begins at `seed` + r, whatever the number of
    stages; later stages have seeds of their own, or all would drop the same elements.
    Stages of one rank draw one after another from one generator.
    """
    mesh = plan.mesh
    stage = mesh.stage(rank) if mesh.pipeline > 1 else 0
    return seed + mesh.data_rank(rank) + stage * mesh.data_parallel


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of torch's random numbers on the CPU and on the device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from what `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_anew(steps: int) -> None:
    """Begin other random numbers than at the start, on a rank that has no state.

    Args:
        steps: Done so far; another number gives other ones.
    """
    # A prime far beyond the number of ranks, whose seeds are next to each other.
    torch.manual_seed(torch.initial_seed() + 1_000_003 * steps)
