"""From recorded steps at three micro-batches to the units of a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from bigmodel.errors import TracingError
from bigmodel.models import (
    Event,
    Gradient,
    Kind,
    ModelSpec,
    Op,
    Param,
    Phases,
    Placed,
    Size,
    Storage,
    Tape,
    Unit,
)
from bigmodel.observe.layout import Layout
from bigmodel.observe.operators import RawOp
from bigmodel.observe.split_backward import POLICY as SPLIT
from bigmodel.observe.storages import (
    Place,
    RawEvent,
    RawFarEnd,
    RawGradient,
    RawStorage,
    StepRecord,
    storage_key,
)
from bigmodel.plans.training_plan import RECOMPUTE_POLICIES

_TAPES = (
    "forward",
    "backward",
    "weights",
    "forward_end",
    "backward_end",
    "weights_end",
)


class LawError(Exception):
    """The events are not the same at every micro-batch."""


def assemble(
    model: nn.Module,
    layout: Layout,
    sizes: Sequence[int],
    recordings: Mapping[str, Sequence[StepRecord]],
) -> ModelSpec:
    """Build the specification of a traced model.

    Args:
        model: The fake model.
        layout: Its unit numbers.
        sizes: Micro-batches of the recordings.
        recordings: For every recompute policy, the steps at the first two or more of
            these micro-batches.

    Raises:
        LawError: The events differ between micro-batches.
        TracingError: A block is called more than once in a forward.
    """
    reference = recordings["none"][0]
    _check_calls(layout, reference.calls)
    places = _parameter_places(model, layout, reference)
    laws: list[str] = []
    units: dict[int, Unit] = {}
    flops = [0] * len(sizes)
    counts = _copies(layout)
    single = frozenset(unit for unit, count in counts.items() if count == 1)
    for number in layout.traced_units:
        phases = {}
        for policy, steps in recordings.items():
            split = policy == SPLIT
            # The graph of a split backward goes as a whole: no unit frees by itself.
            pairs = frozenset() if split else single
            raw = [_raw_tapes(step, number, layout, pairs, split) for step in steps]
            prefix = _prefix(layout, number)
            tapes = {
                key: _fit([tape[key] for tape in raw], sizes, prefix, laws)
                for key in _TAPES
            }
            if split:
                # Its first block alone also sees what the embeddings free.
                whole = phases["none"]
                tapes |= {"forward": whole.forward, "forward_end": whole.forward_end}
            phases[policy] = Phases(**tapes)
        units[number] = Unit(
            number=number,
            params=tuple(places.get(number, ())),
            phases=phases,
            input_bytes_per_sample=_per_sample(
                [step.input_bytes.get(number, 0) for step in recordings["none"]], sizes
            ),
        )
    sequence = _sequence(layout, units)
    for index, step in enumerate(recordings["none"]):
        flops[index] = sum(
            event.counted_flops * counts[place[0]]
            for place, events in step.recording.events.items()
            if place[0] in counts
            for event in events
            if isinstance(event, RawOp)
        )
    return ModelSpec(
        name="",
        sequence=sequence,
        precision="",
        target="cpu",
        sample="",
        sample_bytes=0,
        tokens_per_sample=1,
        flops_per_sample=_per_sample(flops, sizes),
        laws=tuple(dict.fromkeys(laws)),
    )


def _check_calls(layout: Layout, calls: Sequence[int]) -> None:
    if list(calls) != list(range(len(layout.paths))):
        seen: set[int] = set()
        twice = next((c for c in calls if c in seen or seen.add(c)), None)
        what = (
            f"{layout.paths[twice]} is called more than once"
            if twice is not None
            else "they are called in another order, or not all of them"
        )
        raise TracingError(
            f"the blocks {layout.paths[0]} ... {layout.paths[-1]} do not run one after "
            f"another in a forward: {what}; give blocks=() to treat the model as one "
            "unit"
        )


def _copies(layout: Layout) -> dict[int, int]:
    """Return how many blocks every traced unit stands for."""
    counts = dict.fromkeys(layout.traced_units, 0)
    blocks = set()
    for index in range(len(layout.paths)):
        row = layout.rows[layout.row_index(index)]
        unit = layout.unit_of_block(row.template_of(index))
        counts[unit] += 1
        blocks.add(unit)
    return {unit: count if unit in blocks else 1 for unit, count in counts.items()}


def _prefix(layout: Layout, unit: int) -> str:
    for index, path in enumerate(layout.paths):
        if layout.unit_of_block(index) == unit:
            return path + "."
    return ""


def _parameter_places(
    model: nn.Module, layout: Layout, step: StepRecord
) -> dict[int, list[Param]]:
    """Give every parameter and buffer to the unit of its block, or of its first use."""
    block_units = {
        path: layout.unit_of_block(index) for index, path in enumerate(layout.paths)
    }
    owner: dict[int, str] = {}
    places: dict[int, list[Param]] = {}
    named = [
        (name, tensor, False)
        for name, tensor in model.named_parameters(remove_duplicate=False)
    ] + [
        (name, tensor, True)
        for name, tensor in model.named_buffers(remove_duplicate=False)
    ]
    for name, tensor, is_buffer in named:
        path = _enclosing(name, block_units)
        key = storage_key(tensor)
        if path is not None:
            unit, local = block_units[path], name.removeprefix(path + ".")
        else:
            used = step.recording.first_use.get(key, (layout.count - 1, "forward"))
            tied = id(tensor) in owner
            # A tied copy outside the blocks is the head's; its owner is the embedding.
            unit, local = (layout.count - 1 if tied else used[0]), name
        places.setdefault(unit, []).append(
            Param(
                name=local,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                trainable=tensor.requires_grad,
                tied_to=owner.get(id(tensor)),
                buffer=is_buffer,
            )
        )
        owner.setdefault(id(tensor), name)
    return places


def _enclosing(name: str, paths: Mapping[str, int]) -> str | None:
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:end])
        if path in paths:
            return path
    return None


def _raw_tapes(
    step: StepRecord, unit: int, layout: Layout, single: frozenset[int], split: bool
) -> dict[str, list[RawEvent]]:
    events = step.recording.events
    raw: dict[str, list[RawEvent]] = {key: [] for key in _TAPES}
    for phase in ("forward", "backward", "weights"):
        for event in events.get((unit, phase), ()):
            late = _late(event[1], layout, split) if isinstance(event, tuple) else None
            if late is None or not isinstance(event, tuple):
                raw[phase].append(event)
                continue
            what, storage = event
            pair = _partner(storage, single)
            if what == "born":
                # Freed far away: accounted for here, at the end of the rank's phase.
                raw[phase].append(event)
                raw[late].append(
                    ("died", storage) if pair is None else RawFarEnd(storage, pair[1])
                )
            elif pair is not None:
                raw[phase].append(RawFarEnd(storage, pair[0]))
    return raw


def _partner(storage: RawStorage, single: frozenset[int]) -> tuple[int, int] | None:
    """Return the units that make and free a storage, if there is one of each."""
    if storage.died is None or storage.cast:
        return None
    pair = storage.born[0], storage.died[0]
    return pair if single.issuperset(pair) else None


def _late(storage: RawStorage, layout: Layout, split: bool) -> str | None:
    """Say at which end a storage goes that neither its unit nor the next ones free."""
    if storage.gradient:
        return None
    if storage.died is None or storage.died[0] >= layout.count:
        return "backward_end"
    unit, phase = storage.died
    if split and not storage.boundary and phase != "forward":
        # The graph goes as a whole, wherever the follower stands then.
        return None if unit == storage.born[0] else f"{phase}_end"
    cached = storage.cast and phase == "forward" and unit != storage.born[0]
    if unit in layout.neighbours(storage.born[0]) and not cached:
        return None
    return f"{phase}_end"


def _fit(
    raw: Sequence[Sequence[RawEvent]],
    sizes: Sequence[int],
    prefix: str,
    laws: list[str],
) -> Tape:
    lengths = {len(tape) for tape in raw}
    if len(lengths) != 1:
        raise LawError(f"{prefix or 'model'} runs {sorted(lengths)} events")
    events: list[Event] = []
    for group in zip(*raw, strict=True):
        first = group[0]
        if any(_label(event) != _label(first) for event in group):
            raise LawError(
                f"{prefix or 'model'} runs {_label(first)} at one micro-batch and "
                f"{_label(group[-1])} at another"
            )

        def law(values: Sequence[int]) -> Size:
            return _law(values, sizes, prefix, laws)

        if isinstance(first, RawGradient):
            events.append(Gradient(first.param.removeprefix(prefix), first.elements))
        elif isinstance(first, RawOp):
            events.append(
                Op(
                    kind=first.kind,  # pyright: ignore[reportArgumentType]
                    flops=law([event.flops for event in group]),
                    bytes_moved=law([event.bytes_moved for event in group]),
                    dtype=first.dtype,
                )
            )
        elif isinstance(first, RawFarEnd):
            events.append(
                Storage(
                    sign=-1,
                    size=law([event.storage.num_bytes for event in group]),
                    kind=_kind(first.storage),
                    partner=first.partner,
                )
            )
        elif any(event[1].num_bytes for event in group):
            events.append(
                Storage(
                    sign=1 if first[0] == "born" else -1,
                    size=law([event[1].num_bytes for event in group]),
                    kind=_kind(first[1]),
                )
            )
    return Tape(tuple(events))


def _label(event: RawEvent) -> tuple:
    if isinstance(event, RawGradient):
        return ("gradient", event.param)
    if isinstance(event, RawOp):
        return ("op", event.kind, event.dtype)
    if isinstance(event, RawFarEnd):
        return ("far end", event.partner, _kind(event.storage))
    return (event[0], _kind(event[1]))


def _law(
    values: Sequence[int],
    sizes: Sequence[int],
    prefix: str,
    laws: list[str],
) -> Size:
    slope, rest = divmod(values[1] - values[0], sizes[1] - sizes[0])
    fixed = values[0] - slope * sizes[0]
    checked = all(
        fixed + slope * size == value
        for value, size in zip(values, sizes, strict=False)
    )
    if rest or fixed < 0 or not checked:
        text = (
            f"{prefix or 'model'}: sizes {list(values)} at micro-batches {list(sizes)}"
        )
        laws.append(text)
        # Never below what was seen: a line from the origin through the steepest point.
        return Size(0, max(-(-v // s) for v, s in zip(values, sizes, strict=False)))
    return Size(fixed, slope)


def _kind(storage: RawStorage) -> Kind:
    if storage.gradient:
        return "gradient"
    if storage.boundary:
        return "boundary"
    if storage.cast:
        return "cast"
    if storage.partial:
        return "partial"
    return "temporary" if _is_temporary(storage.born, storage.died) else "activation"


def _is_temporary(born: Place, died: Place | None) -> bool:
    return died is not None and (born[1] != "forward" or born == died)


def _per_sample(values: Sequence[int], sizes: Sequence[int]) -> int:
    return (values[1] - values[0]) // (sizes[1] - sizes[0])


def _sequence(layout: Layout, units: Mapping[int, Unit]) -> tuple[Placed, ...]:
    if not layout.paths:
        return (
            Placed(path="", unit=units[0], role="before"),
            Placed(path="", unit=_empty(), role="after"),
        )
    placed = [Placed(path="", unit=units[0], role="before")]
    for index, path in enumerate(layout.paths):
        row_index = layout.row_index(index)
        row = layout.rows[row_index]
        unit = units[layout.unit_of_block(row.template_of(index))]
        placed.append(Placed(path=path, unit=unit))
        if index == row.first + row.length - 1:
            final = row_index == len(layout.rows) - 1
            placed.append(
                Placed(
                    path="",
                    unit=units[layout.unit_after_row(row_index)],
                    role="after" if final else "between",
                )
            )
    return tuple(placed)


def _empty() -> Unit:
    nothing = Phases(forward=Tape(), backward=Tape())
    return Unit(params=(), phases=dict.fromkeys((*RECOMPUTE_POLICIES, SPLIT), nothing))
