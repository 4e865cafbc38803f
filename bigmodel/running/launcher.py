"""Starting the processes of a plan on this machine."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bigmodel.errors import UsageError, Violation, WorldError
from bigmodel.plans import Plan, document
from bigmodel.running.environment import variables_for_workers

_LAST_LINES = 20
"""Lines of a failed process that are shown."""


def run_script(
    script: str | Path,
    args: Sequence[str],
    plan: Plan,
    *,
    processes: int | None = None,
    log_folder: str | Path,
) -> int:
    """Run a Python script in all processes of a plan, and wait for them.

    The script finds the plan by itself: `prepare` and the recipes read its path from
    BIGMODEL_PLAN. Only rank 0's output is shown; the others' goes to files. When one
    process fails, the others are ended and its last lines are shown.

    Args:
        script: The script.
        args: Its arguments.
        plan: The plan, written to `log_folder`/plan.json.
        processes: How many to start; the plan's world when None.
        log_folder: Where outputs go: RUN/attempt_0/RANK/stderr.log.

    Returns:
        0, or the exit code of the process that failed first; 130 after Ctrl-C.

    Raises:
        UsageError: There is no such script.
        WorldError: `processes` is not what the plan needs.
    """
    path, logs = Path(script), Path(log_folder)
    if not path.is_file():
        raise UsageError(f"there is no script {str(path)!r}")
    if processes is not None and processes != plan.world:
        raise WorldError(
            Violation(
                field="processes",
                got=processes,
                rule=f"the plan is for {plan.world} ({plan.describe()})",
                cure=f"start {plan.world}, or plan again for {processes}",
            )
        )
    logs.mkdir(parents=True, exist_ok=True)
    plan_path = document.save(plan, logs / "plan.json").resolve()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.world,
        run_id="bigmodel",
        # A port of its own for every run.
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs),
            redirects=dict.fromkeys(range(1, plan.world), Std.ALL),
        ),
    )
    before = set(logs.iterdir())
    try:
        with variables_for_workers(str(plan_path), plan.world):
            elastic_launch(config, sys.executable)("-u", str(path), *args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        new = [folder for folder in logs.iterdir() if folder not in before]
        _show(rank, failure.exitcode, new)
        # Ended by a signal: a shell's code for it.
        return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode
    except SignalException as error:
        # Ctrl-C, or the end that a batch system sends; the processes are ended.
        return 128 + error.sigval
    return 0


def _show(rank: int, code: int, folders: Sequence[Path]) -> None:
    """Show the end of a failed process's output; rank 0's was shown already."""
    lines = [f"rank {rank} failed with exit code {code}"]
    if rank:
        for folder in folders:
            log = folder / "attempt_0" / str(rank) / "stderr.log"
            if log.is_file():
                lines.append(f"the end of {log}:")
                with log.open(errors="replace") as file:
                    lines += [line.rstrip() for line in deque(file, _LAST_LINES)]
    print("\n".join(lines), file=sys.stderr)
