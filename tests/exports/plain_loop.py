"""A script without a plan: what it does is in the file of accelerate launch.

plain_loop.py KIND OUT ACCUMULATION
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import InitProcessGroupKwargs

from bigmodel.backends.deepspeed.engine import import_deepspeed
from tests.exports import training


def main() -> None:
    kind, out, accumulation = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    handlers = []
    # On GPUs this is just Accelerator().
    if kind == "FSDP":
        PartialState(cpu=True)
        training.shard_over_cpus()
    else:
        import_deepspeed(torch.device("cpu"))
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    accelerator = Accelerator(
        kwargs_handlers=handlers, gradient_accumulation_steps=accumulation
    )
    assert accelerator.distributed_type.value == kind
    losses = training.by_accelerate(
        accelerator, training.make_model(), world=2, micro_batch=2
    )
    if accelerator.is_main_process:
        out.write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
