"""torch's pipeline stage, with gradients of half precision added up in fp32."""

from __future__ import annotations

from typing import Any, final

from torch.distributed.pipelining import PipelineStage

from bigmodel.backends.fp32_sums import Fp32Sums


@final
class SummingStage(PipelineStage):
    """Moves gradients that a split backward sets past the hooks of parameters.

    Args:
        sums: Where they add up; None: with their parameters.
        arguments: Those of torch's stage.
    """

    def __init__(self, *arguments: Any, sums: Fp32Sums | None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sums = sums

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        """Run the part of a backward that makes the gradients of weights."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if self._sums is not None:
            trained = (p for p in self.submod.parameters() if p.requires_grad)
            self._sums.move(trained)
