"""The devices of a process that owns several."""

from __future__ import annotations

import torch

from bigmodel.errors import Violation, WorldError


def own_devices(first: torch.device, count: int) -> list[torch.device]:
    """Return the devices of this process, beginning with the one that it was given.

    CPUs have no number: there every device is the same one.

    Raises:
        WorldError: The process sees fewer GPUs.
    """
    if first.type == "cpu":
        return [first] * count
    seen = torch.cuda.device_count()
    if count > seen:
        raise WorldError(
            Violation(
                field="devices_per_process",
                got=count,
                rule=f"this process sees {seen} GPUs",
                cure=f"plan for {seen}, or make more visible by CUDA_VISIBLE_DEVICES",
            )
        )
    return [torch.device("cuda", index) for index in range(count)]
