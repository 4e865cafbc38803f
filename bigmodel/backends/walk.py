"""Walking through a model's units as an engine does, writing tasks; shared by shadows.

A shadow subclasses nothing: it passes hooks, the same ones in the same order as its
engine has them. Pure: no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bigmodel.backends.kept_inputs import KeptInputs
from bigmodel.models import INPUTS_KEPT, Gradient, Param, Placed, Unit
from bigmodel.plans import Plan
from bigmodel.simulator import Costs, ProgramBuilder, Segment, Task
from bigmodel.simulator.program import Member, Stream, merge

WEIGHTS = "weights"
MASTERS = "fp32 master weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
BUFFERS = "buffers"
BATCH = "batch"
BUCKETS = "communication buckets"
HOOK = "communication hook"
GATHERED = "gathered weights"
STEP = "optimizer step"
SPLIT = "split"
"""Key of the phases whose backward comes in two parts; see `models.Unit`."""
_ALL_PHASES = (
    "forward",
    "backward",
    "weights",
    "forward_end",
    "backward_end",
    "weights_end",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A unit on this rank, with its policy under the plan."""

    placed: Placed
    policy: str
    tapes: str
    """Key of its phases: its policy, or beside the blocks that of the block it feeds,
    which decides how long what it hands over lives."""
    owned: tuple[Param, ...]
    """Parameters that this rank holds for the unit: no tied copies of its own."""
    receives_input: bool = False
    """Its input lies in a receive buffer of the pipeline."""
    receives_gradient: bool = False
    """The gradient of its output lies in a receive buffer of the pipeline."""
    split: tuple[Param, ...] = ()
    """Parameters tied to one outside this walk. On another rank that has a gradient of
    its own; in another stage of this rank the gradient appears here."""
    settled: frozenset[str] = frozenset()
    """Full names of the others of such pairs: their gradient appears elsewhere."""

    @property
    def unit(self) -> Unit:
        """The unit's record."""
        return self.placed.unit

    @property
    def label(self) -> str:
        """What reports call the unit."""
        return self.placed.path or f"({self.placed.role} the blocks)"

    def full_name(self, param: Param) -> str:
        """Return the path of a parameter in the whole model."""
        return _full_name(self.placed, param)

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(param.elements for param in self.owned)


def steps_of(
    plan: Plan, placed: Sequence[Placed], beside: Sequence[Placed] = ()
) -> tuple[Step, ...]:
    """Return a rank's units in forward order with the recompute policy of each.

    Args:
        plan: The plan.
        placed: The units.
        beside: Units of other stages on the same rank, with which they share tensors.
    """
    policies = dict(zip(plan.units, plan.recompute, strict=False))
    here = {_full_name(p, param) for p in placed for param in p.unit.owned()}
    there = {_full_name(p, param) for p in beside for param in p.unit.owned()}
    settled = frozenset(
        param.tied_to
        for p in beside
        for param in p.unit.params
        if param.tied_to is not None and param.tied_to in here
    )
    # Where DeepSpeed replaces torch's `linear`.
    stage3 = plan.backend == "deepspeed" and plan.zero_stage == 3
    steps: list[Step] = []
    fed = next((policies[p.path] for p in reversed(placed) if p.path in policies), "")
    # What the last block's last product returned is kept until its backward.
    tapes = "selective" if fed == "selective" else "none"
    for p in reversed(placed):
        tapes = policies.get(p.path, tapes)
        key = tapes + INPUTS_KEPT * stage3
        copies = tuple(param for param in p.unit.params if param.tied_to is not None)
        apart = tuple(param for param in copies if param.tied_to not in here)
        steps.append(
            Step(
                placed=p,
                policy=policies.get(p.path, "none"),
                tapes=key if key in p.unit.phases else tapes,
                owned=(
                    *p.unit.owned(),
                    *(param for param in apart if param.tied_to not in there),
                ),
                split=apart,
                settled=settled,
            )
        )
    return tuple(reversed(steps))


def gradient_name(placed: Placed, gradient: Gradient) -> str:
    """Return the full name of the parameter whose gradient it is."""
    return f"{placed.path}.{gradient.param}" if placed.path else gradient.param


def _full_name(placed: Placed, param: Param) -> str:
    return f"{placed.path}.{param.name}" if placed.path else param.name


def weight_bytes(plan: Plan) -> int:
    """Return the bytes of one element of the weights that compute."""
    return plan.number_format.weight_bytes


def communication(costs: Costs) -> Stream:
    """Return the stream of collectives; gloo moves bytes with the computing cores."""
    return "compute" if costs.cluster.device.kind == "cpu" else "communication"


def scratch(costs: Costs, num_bytes: int) -> int:
    """Return what a collective allocates for itself beside its input and output.

    gloo's all-gather and reduce-scatter of one tensor work on a copy of the large side
    (torch 2.13, measured with the CPU allocator's events); NCCL works in place.
    """
    return num_bytes if costs.cluster.device.kind == "cpu" else 0


def trainable(steps: Sequence[Step]) -> list[Param]:
    """Return the trained parameters of these units, tied ones once."""
    return [p for step in steps for p in step.owned if p.trainable]


def hold_inputs(
    builder: ProgramBuilder, costs: Costs, plan: Plan, steps, *, batch: bool = True
) -> None:
    """Hold what every engine keeps whole: the buffers and the batch of one step."""
    builder.hold(BUFFERS, sum(step.unit.buffer_bytes for step in steps))
    if batch:
        hold_batch(builder, costs, plan)


def hold_batch(builder: ProgramBuilder, costs: Costs, plan: Plan) -> None:
    """Hold the batch of one step.

    Where targets are counted, the machine's memory keeps one micro-batch that has some,
    for a rank that is left without (`running/loss_shares.py`).
    """
    sample = costs.model.sample_bytes
    builder.hold(BATCH, sample * plan.local_batch)
    if costs.model.counts_targets:
        on_host = costs.cluster.device.kind == "cuda"
        keep = builder.hold_on_host if on_host else builder.hold
        keep(BATCH, sample * plan.micro_batch)


def hold_weights(builder: ProgramBuilder, plan: Plan, steps: Sequence[Step]) -> None:
    """Hold whole weights, and fp32 masters of trained ones where weights are 16-bit."""
    width = weight_bytes(plan)
    sizes = [param.elements for step in steps for param in step.owned]
    builder.hold(WEIGHTS, sum(sizes) * width, [size * width for size in sizes])
    if width == 2:
        kept = [4 * param.elements for param in trainable(steps)]
        builder.hold(MASTERS, sum(kept), kept)


class Walk:
    """Forward and backward of a rank's units.

    Args:
        plan: The plan.
        costs: Segments of the units.
        builder: The program that is written.
        steps: The rank's units in forward order.
    """

    def __init__(
        self, plan: Plan, costs: Costs, builder: ProgramBuilder, steps: Sequence[Step]
    ) -> None:
        self.plan = plan
        self.costs = costs
        self.builder = builder
        self.steps = steps
        self.ends_with_others = False
        """Whether a pass ends by `end` only, together with other units' walks."""
        self._inputs = KeptInputs(plan, costs, builder, steps)
        # Units whose tapes are of one recording.
        self._beside: defaultdict[str, frozenset[int]] = defaultdict(frozenset)
        for step in steps:
            self._beside[step.tapes] |= {step.unit.number}
            builder.join(
                Member(
                    name=step.label,
                    elements=step.elements,
                    trainable_elements=sum(p.elements for p in trainable([step])),
                    buffer_bytes=step.unit.buffer_bytes,
                )
            )

    def forward(
        self,
        name: str,
        before: Callable[[int], tuple[int, ...]] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Write the forward of one micro-batch.

        Args:
            name: Of the micro-batch, for labels.
            before: Called with the unit's index before its forward; returns the tasks
                to wait for.
            after: Called with the unit's index after its forward.
        """
        for index, step in enumerate(self.steps):
            self.builder.turn = step.label
            waits = before(index) if before else ()
            self._inputs.before_forward(index)
            segment = self._whole(step, "forward")
            self._compute(segment, f"forward {name} {step.label}", waits)
            self._inputs.after_forward(index)
            if after:
                after(index)
        self.builder.turn = ""
        if not self.ends_with_others:
            self.end("forward", name)

    def backward(
        self,
        name: str,
        before: Callable[[int], tuple[int, ...]] | None = None,
        after: Callable[[int], None] | None = None,
        on_gradients: Callable[[tuple[Gradient, ...], int], None] | None = None,
    ) -> None:
        """Write the backward of one micro-batch, last unit first.

        Args:
            name: Of the micro-batch, for labels.
            before: As for `forward`.
            after: As for `forward`.
            on_gradients: Called with the gradients that a task has completed, and the
                index of the task; without it a unit's backward is one task.
        """
        for index in reversed(range(len(self.steps))):
            step = self.steps[index]
            self.builder.turn = step.label
            waits = before(index) if before else ()
            self._inputs.before_backward(index)
            label = f"backward {name} {step.label}"
            if on_gradients is None:
                segment = self._whole(step, "backward")
                self._compute(segment, label, waits)
            else:
                made: set[str] = set()
                for segment in self._segments(step, "backward"):
                    task = self._compute(segment, label, waits)
                    waits = ()
                    ready = tuple(
                        gradient
                        for gradient in segment.gradients
                        if gradient_name(step.placed, gradient) not in step.settled
                    )
                    made |= {gradient.param for gradient in ready}
                    if ready:
                        on_gradients(ready, task)
                apart = tuple(
                    Gradient(p.name, p.elements)
                    for p in step.split
                    if p.name not in made
                )
                if apart:
                    on_gradients(apart, self.builder.last)
            if after:
                after(index)
        self.builder.turn = ""
        if not self.ends_with_others:
            self.end("backward", name)

    def end(self, phase: str, name: str) -> None:
        """Write what units free once the whole `forward` or `backward` has ended."""
        for step in self.steps:
            segment = self._whole(step, f"{phase}_end")
            if segment.change:
                self._compute(segment, f"end of {phase} {name}", (), step.label)

    def backward_of_inputs(self, name: str) -> None:
        """Write the gradients of inputs alone, last unit first."""
        for step in reversed(self.steps):
            segment = self._whole(step, "backward", SPLIT)
            label = f"backward of inputs {name} {step.label}"
            self._compute(segment, label, (), step.label)
        self._split_ends("backward_end", f"end of backward of inputs {name}")

    def backward_of_weights(
        self, name: str, on_gradients: Callable[[tuple[Gradient, ...], int], None]
    ) -> None:
        """Write the gradients of weights alone, first unit first."""
        for step in self.steps:
            self.builder.turn = step.label
            label = f"backward of weights {name} {step.label}"
            for segment in self._segments(step, "weights", SPLIT):
                task = self._compute(segment, label, ())
                if segment.gradients:
                    on_gradients(segment.gradients, task)
        self.builder.turn = ""
        self._split_ends("weights_end", f"end of backward of weights {name}")

    def residue(
        self, policy: str | None = None, phases: Sequence[str] = _ALL_PHASES
    ) -> dict[str, int]:
        """Return, by holder, the bytes that a micro-batch leaves live at its end.

        In a whole model only gradients; a pipeline stage also hands some of what it
        makes to others, and frees some of what they made.

        Args:
            policy: Key of the phases; None: every unit's `tapes`.
            phases: Those that are summed.
        """
        changes = (
            self._whole(step, phase, policy).change
            for step in self.steps
            for phase in phases
        )
        return dict(merge(*changes))

    def _segments(
        self, step: Step, phase: str, policy: str | None = None
    ) -> tuple[Segment, ...]:
        key = policy or step.tapes
        on_rank = self._on_rank(step, key)
        return self.costs.segments(
            step.unit, key, phase, self.plan.micro_batch, **on_rank
        )

    def _whole(self, step: Step, phase: str, policy: str | None = None) -> Segment:
        key = policy or step.tapes
        on_rank = self._on_rank(step, key)
        return self.costs.whole(step.unit, key, phase, self.plan.micro_batch, **on_rank)

    def _on_rank(self, step: Step, key: str) -> dict[str, Any]:
        """Return what of the rank's other units decides what a unit costs here."""
        return {
            "receives_input": step.receives_input,
            "receives_gradient": step.receives_gradient,
            "apart": step.split,
            "beside": self._beside[key],
        }

    def _split_ends(self, phase: str, label: str) -> None:
        for step in self.steps:
            segment = self._whole(step, phase, SPLIT)
            if segment.change:
                self._compute(segment, label, (), step.label)

    def _compute(
        self,
        segment: Segment,
        label: str,
        waits: tuple[int, ...],
        unit: str | None = None,
    ) -> int:
        return self.builder.add(
            Task(
                label=label,
                seconds=segment.seconds,
                after=waits,
                change=segment.change,
                surge=segment.surge,
                tensors=segment.tensors,
                unit=unit,
            )
        )
