"""The mesh: how many ways the job is split along each axis."""

from __future__ import annotations

from dataclasses import dataclass

from bigmodel.errors import InvalidPlanError, Violation, raise_if_any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the mesh axes; their product is the world size.

    Ranks are laid out with `pipeline` outermost and `shard` innermost, so that the
    ranks which talk most sit next to each other:
    rank = (stage * replicate + replica) * shard + shard index.
    """

    pipeline: int = 1
    """Pipeline stages."""
    replicate: int = 1
    """Groups that hold equal weights (DDP, the outer axis of HSDP)."""
    shard: int = 1
    """Ranks among which states are sharded (ZeRO, FSDP2)."""

    def __post_init__(self) -> None:
        raise_if_any(
            [
                Violation(
                    field=f"mesh.{axis}",
                    got=size,
                    rule="a mesh axis is a whole number of at least 1",
                )
                for axis, size in self.axes().items()
                if not isinstance(size, int) or isinstance(size, bool) or size < 1
            ],
            InvalidPlanError,
        )

    def axes(self) -> dict[str, int]:
        """Return the axis sizes by name, outermost first."""
        return {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
        }

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.data_parallel

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different data."""
        return self.replicate * self.shard

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // self.data_parallel

    def data_rank(self, rank: int) -> int:
        """Return which share of the data a rank reads."""
        return rank % self.data_parallel

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold a stage."""
        first = stage * self.data_parallel
        return tuple(range(first, first + self.data_parallel))

    def __str__(self) -> str:
        parts = [f"{axis} {size}" for axis, size in self.axes().items() if size > 1]
        return " x ".join(parts) or "1 process"
