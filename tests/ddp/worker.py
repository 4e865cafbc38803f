"""One rank of the launch that runs all checks: torchrun worker.py FOLDER [NAME...]."""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from tests.ddp.checks import CHECKS


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results: dict[str, str] = {}
    for name, check in CHECKS.items():
        if names and name not in names:
            continue
        try:
            check()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
