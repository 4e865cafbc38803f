"""ModelSpec: everything the planner knows about a model, without the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

from bigmodel.models.optimizers import Shape
from bigmodel.models.tape import Tape

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A parameter or a buffer of a unit."""

    name: str
    """Path inside the unit."""
    shape: tuple[int, ...]
    dtype: str
    """Element type that the model gives it, before any plan changes it."""
    trainable: bool = True
    tied_to: str | None = None
    """Full path of the parameter whose storage this one shares; it is counted there."""
    buffer: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the model's own element type."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Forward and backward of a unit under one recompute policy."""

    forward: Tape
    backward: Tape
    """Under `full`, begins with the recomputed forward."""
    forward_end: Tape = field(default_factory=Tape)
    """What it frees when the forward of all units of a rank has ended: copies of
    weights that autocast caches."""
    backward_end: Tape = field(default_factory=Tape)
    """What it frees when the backward of all units of a rank has ended."""
    weights: Tape = field(default_factory=Tape)
    """Gradients of weights, where `backward` has those of inputs alone."""
    weights_end: Tape = field(default_factory=Tape)
    """What it frees when the gradients of the weights of all units are made."""


INPUTS_KEPT = " with inputs kept"
"""Ending of a recompute policy's key in `Unit.phases`, in models with frozen parts: the
same where linear layers keep their inputs though their weights do not train, as under
ZeRO stage 3."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A block of the model; equal blocks share one record."""

    params: tuple[Param, ...]
    """In order of registration, buffers last."""
    phases: dict[str, Phases]
    """By recompute policy. Under `split` the backward of `none` in two parts, for
    models that can be cut into stages."""
    input_bytes_per_sample: int = 0
    """Bytes of the activations that the unit before hands over, per sample."""
    number: int = -1
    """Tells units apart, see `Storage.partner`."""

    def owned(self) -> Iterator[Param]:
        """Yield the parameters that are counted here: no buffers, no tied copies."""
        return (p for p in self.params if not p.buffer and p.tied_to is None)

    @cached_property
    def elements(self) -> int:
        """Number of parameters that are counted here."""
        return sum(param.elements for param in self.owned())

    @cached_property
    def trainable_elements(self) -> int:
        """Number of trainable parameters that are counted here."""
        return sum(param.elements for param in self.owned() if param.trainable)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(param.num_bytes for param in self.params if param.buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a unit stands in the model."""

    path: str
    """Module path of the block; `` for the parts before and after the blocks."""
    unit: Unit
    role: Literal["before", "block", "between", "after"] = "block"
    """`between`: code between two containers of blocks (encoder and decoder)."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A traced model: its units in forward order with all that they allocate."""

    name: str
    sequence: tuple[Placed, ...]
    """First what comes before the blocks, then the blocks, then what comes after."""
    precision: str
    """Precision that was traced."""
    target: Literal["cuda", "cpu"]
    """Kind of device whose operators were traced."""
    sample: str
    """One sample in words: `input_ids int64[8192], labels int64[8192]`."""
    sample_bytes: int
    """Bytes of one sample of the batch."""
    tokens_per_sample: int
    """Tokens of one sample; 1 where a sample is no sequence."""
    flops_per_sample: int
    """FLOP of forward and backward of one sample without recomputation, attention
    counted in full (the PaLM convention, arXiv 2204.02311 appendix B)."""
    source: str = ""
    """Where the model comes from."""
    cuts: tuple[int, ...] = ()
    """Indices of the blocks with which a pipeline stage can begin."""
    uncuttable: str = ""
    """Why no stage can begin with the other blocks; empty when there are none."""
    counts_targets: bool = False
    """Whether engines weigh micro-batches by their targets unless told otherwise: those
    of a model of transformers that computes its own loss."""
    splits: bool = False
    """Whether torch can run its backward in two parts, as some schedules do."""
    laws: tuple[str, ...] = field(default=())
    """Sizes that did not obey an affine law, in words; empty in most models."""

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Module paths of the blocks, as `Plan.units` names them."""
        return tuple(p.path for p in self.sequence if p.role == "block")

    @cached_property
    def blocks(self) -> tuple[Unit, ...]:
        """The blocks, one entry for each of `units`."""
        return tuple(p.unit for p in self.sequence if p.role == "block")

    @property
    def before(self) -> Unit:
        """What comes before the first block: embeddings."""
        return self.sequence[0].unit

    @property
    def after(self) -> Unit:
        """What comes after the last block: norm, head, loss."""
        return self.sequence[-1].unit

    @cached_property
    def elements(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(placed.unit.elements for placed in self.sequence)

    @cached_property
    def trained_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the trainable parameters, tied ones once."""
        return tuple(
            param.shape
            for placed in self.sequence
            for param in placed.unit.owned()
            if param.trainable
        )

    @cached_property
    def trainable_elements(self) -> int:
        """Number of trainable parameters, tied ones once."""
        return sum(placed.unit.trainable_elements for placed in self.sequence)
