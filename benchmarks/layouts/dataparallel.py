"""torch.nn.DataParallel; without GPUs torch runs the model as it is, on one device."""

from __future__ import annotations

from collections.abc import Iterator

from bigmodel.plans import Plan


def layouts(
    world: int, units: tuple[str, ...], elements: int
) -> Iterator[tuple[str, Plan]]:
    if world == 1:
        yield (
            "dataparallel",
            Plan(backend="dataparallel", units=units, devices_per_process=2),
        )
