"""One rank of the launch that runs all checks: worker.py FOLDER [NAME...]."""

from __future__ import annotations

import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from bigmodel.backends.deepspeed.engine import import_deepspeed
from tests.exports.checks import CHECKS, prepare_folder


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    # DeepSpeed would compile a collective of its own on CPUs.
    import_deepspeed(torch.device("cpu"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    prepare_folder(str(folder / "model"))
    results: dict[str, str] = {}
    for name, check in CHECKS.items():
        if names and name not in names:
            continue
        begun = time.monotonic()
        try:
            said = check()
            results[name] = ""
            if dist.get_rank() == 0:
                seconds = time.monotonic() - begun
                print(f"{name}: {said or 'right'} ({seconds:.1f} s)", flush=True)
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
