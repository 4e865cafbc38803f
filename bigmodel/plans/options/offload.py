"""Where a plan keeps what does not compute at the moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bigmodel.errors import Violation
from bigmodel.plans.options.checks import one_of

Tier = Literal["device", "cpu", "disk"]
"""The device that computes, the memory of its machine, or a disk of its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The tier of each kind of state; all on the device unless told otherwise."""

    parameters: Tier = "device"
    """Weights between uses, and gradients with them."""
    optimizer: Tier = "device"
    """Optimizer states and fp32 masters; the optimizer steps where they are."""
    activations: Tier = "device"
    """What recomputed units keep of their inputs: `device` or `cpu`."""
    folder: str = ""
    """Folder of the disk tier, on every machine."""

    @property
    def uses_disk(self) -> bool:
        """Whether anything is kept on a disk."""
        return "disk" in (self.parameters, self.optimizer)

    def violations(self) -> Iterator[Violation]:
        """Yield what can never be right."""
        for name in ("parameters", "optimizer", "activations"):
            yield from one_of(f"offload.{name}", getattr(self, name), Tier)
        if self.activations == "disk":
            yield Violation(
                field="offload.activations",
                got="disk",
                rule="activations are kept on the device or in the CPU's memory",
            )
        if self.uses_disk and not self.folder:
            yield Violation(
                field="offload.folder",
                got="",
                rule="the disk tier needs a folder",
                cure="name one on a local disk of every machine",
            )
