"""In which tier ZeRO 3 keeps shards, states and gradients, and what moves between them.

Source: deepspeed 0.19, `runtime/zero/{stage3,partition_parameters}.py`,
`runtime/swap_tensor/optimizer_utils.py`. An offloaded optimizer keeps masters, states,
shards of the gradients and a fp32 copy of these where it is. Offloaded parameters are
shards in the machine's memory; before an all-gather they are copied to the device.

On a disk is what `disk.py` says; the rest of that tier stays in the machine's memory,
and shards of weights that every rank keeps whole on the device. Gradients of the last
micro-batch go to the disk in fp32. Small ones, and the rests of those whose length is
not aligned, wait where they are for the optimizer's step, each with all of its tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from bigmodel.backends.deepspeed.disk import (
    aligned,
    is_split,
    is_swapped,
    shard_buffers,
    state_buffers,
)
from bigmodel.backends.deepspeed.shares import Shares
from bigmodel.backends.flat_zero import NORM_BYTES
from bigmodel.backends.walk import GRADIENTS, STEP, WEIGHTS, weight_bytes
from bigmodel.backends.zero_states import States
from bigmodel.backends.zero_types import accumulation_type
from bigmodel.models import OPTIMIZERS
from bigmodel.plans import Plan
from bigmodel.plans.number_formats import BYTES
from bigmodel.plans.options.offload import Tier
from bigmodel.simulator import ProgramBuilder, Task

_BUFFERS = "buffers of what goes to the disk"


@final
class Tiers:
    """Everything of a rank that a plan may offload.

    Args:
        plan: The plan.
        states: Of the optimizer.
        builder: The program that is written.
        shares: What the rank holds a shard of.
        ranks: How many share the model.
    """

    def __init__(
        self,
        plan: Plan,
        states: States,
        builder: ProgramBuilder,
        shares: Shares,
        ranks: int,
    ) -> None:
        self._plan = plan
        self._states = states
        self._builder = builder
        self._shares = shares
        self._ranks = ranks
        self._width = weight_bytes(plan)
        self._summed = BYTES[accumulation_type(plan)]
        self._kept = OPTIMIZERS.get(plan.optimizer).states
        self._waiting = 0

    def hold(self) -> None:
        """Hold what is there through the whole step."""
        plan, states, shares = self._plan, self._states, self._shares
        offload = plan.offload
        self._hold_weights()
        for elements in shares.groups:
            swapped = self._is_swapped(elements)
            states.hold(elements, "disk" if swapped else self._near(offload.optimizer))
            if states.offloaded and not swapped:
                states.keep("cpu", GRADIENTS, elements * 4)
        tier = self._near(offload.optimizer)
        states.keep(tier, GRADIENTS, shares.trained * self._summed)
        if offload.optimizer == "disk":
            size = aligned(max(shares.groups), 4)
            self._builder.hold_on_host(_BUFFERS, state_buffers(self._kept) * size)

    def gather(self, num_bytes: int) -> None:
        """Bring shards of an all-gather to the device."""
        tier = self._plan.offload.parameters
        if tier == "disk":
            # Nearly: small shards come from memory.
            self._states.disk("weights from the disk", num_bytes // self._ranks)
        if tier != "device":
            self._states.copy("weights from the host", num_bytes // self._ranks)

    def take(self, shards: list[int], *, beside: int, last: bool) -> None:
        """Hand a bucket's shards of gradients over to their sums, and these on.

        Args:
            shards: Elements of each.
            beside: Bytes that are there meanwhile because of the shards.
            last: Whether the micro-batch is the last one of the step.
        """
        states, builder = self._states, self._builder
        if not states.offloaded:
            return
        states.copy("gradients to the host", sum(shards) * self._summed)
        if not last:
            return
        surge = beside + max(shards) * NORM_BYTES
        builder.add(Task(label="gradient norm", surge=((STEP, surge),)))
        if any(map(self._is_swapped, self._shares.groups)):
            self._write(shards, beside)
        else:
            states.copy("fp32 gradients to the host", sum(shards) * 4)

    def step(self, elements: int) -> None:
        """Write the optimizer's step over an offloaded sub-group."""
        states = self._states
        swapped = self._is_swapped(elements)
        tensors = 1 + self._kept
        if swapped:
            states.disk("states from the disk", (tensors + 1) * elements * 4)
        states.step(elements)
        if self._plan.offload.parameters == "disk":
            states.disk("weights to the disk", elements * self._width)
        if swapped:
            states.disk("states to the disk", tensors * elements * 4)

    def end_step(self) -> None:
        """Let go of gradients that waited, and bring weights back to the device."""
        if self._waiting:
            self._builder.allocate(GRADIENTS, -self._waiting, "drop small gradients")
        self._waiting = 0
        if self._plan.offload.parameters == "device" and self._states.offloaded:
            size = self._shares.trained * self._width
            self._states.copy("weights to the device", size)

    def hold_shard_buffers(self, modules: Iterable[int], embeddings: int) -> None:
        """Hold the buffers of weights on a disk; see `disk.shard_buffers`."""
        shares, width = self._shares, self._width
        largest = max(shares.shards, default=0)
        count = shard_buffers(modules, embeddings)
        size = (
            count * aligned(largest, width) + max(shares.groups) * self._ranks * width
        )
        self._builder.hold_on_host(_BUFFERS, size)

    def _hold_weights(self) -> None:
        states, shares, width = self._states, self._shares, self._width
        tier = self._plan.offload.parameters
        if tier != "disk":
            states.keep(tier, WEIGHTS, shares.weights * width)
            return
        swapped = sum(count for count in shares.shards if is_swapped(count, width))
        whole = sum(shares.persistent) // self._ranks
        states.keep("disk", WEIGHTS, swapped * width)
        states.keep("device", WEIGHTS, whole * width)
        states.keep("cpu", WEIGHTS, (sum(shares.shards) - swapped) * width)

    def _write(self, shards: list[int], beside: int) -> None:
        """Write gradients in fp32; on a CPU the sums themselves serve, if they are."""
        if self._states.apart or self._summed != 4:
            waiting = 4 * sum(
                count for count in shards if not is_swapped(count, 4) or is_split(count)
            )
            self._builder.add(
                Task(
                    label="gradients to fp32",
                    change=((GRADIENTS, waiting),),
                    surge=((GRADIENTS, beside + sum(shards) * 4),),
                )
            )
            self._waiting += waiting
        written = sum(count for count in shards if is_swapped(count, 4))
        self._states.disk("gradients to the disk", written * 4)

    def _is_swapped(self, group: int) -> bool:
        """Say whether the states of a sub-group of so many elements are on the disk."""
        return self._plan.offload.optimizer == "disk" and is_swapped(group, 4)

    @staticmethod
    def _near(tier: Tier) -> Tier:
        """Return the tier of what a disk does not take."""
        return "cpu" if tier == "disk" else tier
