"""Checks that need several processes: all of one module run in one launch.

A module of checks has functions named after the case they show, `pp_05_...`; each runs
on every rank and raises if something is wrong. Several modules with a + between their
names share a launch. Run by torchrun, this file is a rank.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 280


def checks_of(module: str) -> dict[str, Callable[[], None]]:
    """Return the checks of `tests.cases.MODULE` by name, in their order."""
    several = (importlib.import_module(f"tests.cases.{m}") for m in module.split("+"))
    return {
        name: value
        for found in several
        for name, value in vars(found).items()
        if inspect.isfunction(value)
        and value.__module__ == found.__name__
        and name.split("_")[1:2]
        and name.split("_")[1].isdigit()
    }


def folder_of_launch(module: str) -> Path:
    """Return where a launch writes; its ranks find it in CASES_FOLDER."""
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"cases-{os.getpid()}-{module}"


@cache
def results(module: str, world: int) -> list[dict[str, str]]:
    """Return what every rank says of every check; an empty text is good."""
    folder = folder_of_launch(module)
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", __file__, module, str(folder)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CASES_FOLDER": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    files = [folder / f"{rank}.json" for rank in range(world)]
    missing = dict.fromkeys(checks_of(module), done.stdout[-4000:])
    return [json.loads(f.read_text()) if f.exists() else missing for f in files]


def assert_check(module: str, world: int, name: str) -> None:
    """Fail with the traceback of the first rank on which a check failed."""
    for rank, found in enumerate(results(module, world)):
        text = found.get(name, "the launch ended before this check")
        assert not text, f"rank {rank}:\n{text}"


def main() -> None:
    """Run all checks on this rank."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    module, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, str] = {}
    for name, check in checks_of(module).items():
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
