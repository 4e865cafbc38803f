"""One rank of the launch that runs all checks: torchrun worker.py FOLDER [NAME...]."""

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

from tests.fsdp2 import filling_checks, gradient_checks, option_checks

CHECKS = {
    name: value
    for module in (gradient_checks, option_checks, filling_checks)
    for name, value in vars(module).items()
    if name.startswith("check_")
}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results: dict[str, str] = {}
    for name, check in CHECKS.items():
        if names and name not in names:
            continue
        begin = time.perf_counter()
        try:
            check()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - begin
            print(f"{name} {seconds:.1f} s {results[name]}", flush=True)
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
