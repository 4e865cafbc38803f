"""torch's `linear`, which ZeRO stage 3 replaces in the whole process.

DeepSpeed 0.19 never gives it back (`_enable_mem_efficient_linear` in `runtime/zero/
partition_parameters.py`). Whatever the process trains next would go on with the
replacement, which keeps the inputs of frozen layers too and casts weights under
autocast at every use: 15 % more memory for adapters, 10 % less under autocast, and not
what any plan says.
"""

from __future__ import annotations

import weakref
from typing import final

from torch.nn import functional

_OWN = "linear_bk"
"""Where DeepSpeed keeps torch's own."""


@final
class ReplacedLinear:
    """Held by an engine of stage 3; the last one that goes gives `linear` back."""

    _open = 0

    def __init__(self) -> None:
        ReplacedLinear._open += 1
        weakref.finalize(self, _leave)


def _leave() -> None:
    from deepspeed.runtime.zero import partition_parameters as patched

    ReplacedLinear._open -= 1
    last = not ReplacedLinear._open
    if last and functional.linear is patched.zero3_linear_wrap:
        functional.linear = getattr(
            patched.InsertPostInitMethodToModuleSubClasses, _OWN
        )
