"""Starting the processes of a plan on this machine, and ending them together.

The launcher serves the store at which the ranks meet, so its port is a free one that
nobody else can take in between. Processes, their logs and their error files are those
of torch's elastic agent; so are the variables that scripts read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    Std,
    start_processes,
)

from bigmodel.errors import UsageError, Violation, WorldError
from bigmodel.plans import Plan, document
from bigmodel.running.culprit import Leftover, find_culprit
from bigmodel.running.environment import threads_per_worker
from bigmodel.running.nodes import Ending, Meeting, Node

_POLL_SECONDS = 0.1
_END_SECONDS = 5
"""How long a process may take to end before it is killed."""


def run_script(
    script: str | Path,
    args: Sequence[str],
    plan: Plan,
    *,
    processes: int | None = None,
    log_folder: str | Path,
    node: Node | None = None,
    join_timeout: float = 600.0,
) -> int:
    """Run a Python script in the processes of a plan, and wait for them.

    The script finds the plan by itself: `prepare` and the recipes read its path from
    BIGMODEL_PLAN. Only rank 0's output is shown; the others' goes to files. When one
    process fails, all are ended, on every machine; the end of its output is shown,
    and last of all its rank and its error.

    Args:
        script: The script.
        args: Its arguments.
        plan: The plan, written to `log_folder`/plan.json.
        processes: How many to start in all; the plan's world when None.
        log_folder: Where outputs go: JOB_*/attempt_0/LOCAL_RANK/stderr.log.
        node: This machine among several; None: the only one.
        join_timeout: Seconds to wait for the other machines.

    Returns:
        0, or the exit code of the process that failed first; 128 plus the number of a
        signal that ended it, or this process: 130 after Ctrl-C.

    Raises:
        UsageError: There is no such script, or a node that cannot be.
        WorldError: `processes` is not what the plan needs, the nodes cannot share them
            equally, or the port is in use.
        WorkerError: A machine never came.
    """
    path, logs, node = Path(script), Path(log_folder), node or Node()
    if not path.is_file():
        raise UsageError(f"there is no script {str(path)!r}")
    _check_world(plan, processes, node)
    logs.mkdir(parents=True, exist_ok=True)
    name = "plan.json" if node.index == 0 else f"plan.node-{node.index}.json"
    plan_path = document.save(plan, logs / name).resolve()
    meeting = Meeting(node, document.digest(plan), join_timeout)
    here = plan.world // node.count
    if node.count > 1 and node.index == 0:
        _say(
            f"job {meeting.job}: {node.count} nodes with {here} processes each, "
            f"meeting at {node.master_address}:{meeting.port}"
        )
    environments = {
        index: _variables(plan, node, meeting, index, str(plan_path))
        for index in range(here)
    }
    shown = 0 if node.index == 0 else None
    # It says who ended first, which need not be who failed first.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    context: PContext | None = None
    try:
        context = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args={index: ("-u", str(path), *args) for index in environments},
            envs=environments,
            logs_specs=DefaultLogsSpecs(
                log_dir=str(logs),
                redirects={i: Std.ALL for i in environments if i != shown},
            ),
        )
        ending = _watch(context, meeting, node.index * here)
    except SignalException as error:
        # Ctrl-C, or the end that a batch system sends.
        code = 128 + error.sigval
        text = f"ended by {error.sigval.name}{meeting.where()}"
        meeting.end(Ending(code=code, text=text))
        return code
    finally:
        if context is not None:
            context.close(timeout=_END_SECONDS)
    if ending.code:
        _say(f"error: {ending.text}")
    return ending.code


def _check_world(plan: Plan, processes: int | None, node: Node) -> None:
    violations = []
    if processes is not None and processes != plan.world:
        violations.append(
            Violation(
                field="processes",
                got=processes,
                rule=f"the plan is for {plan.world} ({plan.describe()})",
                cure=f"start {plan.world}, or plan again for {processes}",
            )
        )
    if plan.world % node.count:
        violations.append(
            Violation(
                field="nodes",
                got=node.count,
                rule=f"the plan's {plan.world} processes must divide equally among "
                "them",
                cure="give another number of nodes, or plan again for a cluster of "
                "this shape",
            )
        )
    if violations:
        raise WorldError(violations)


def _variables(
    plan: Plan, node: Node, meeting: Meeting, index: int, plan_path: str
) -> dict[str, str]:
    """Return what a worker's environment gets: torchrun's variables and the plan."""
    here = plan.world // node.count
    return {
        "BIGMODEL_PLAN": plan_path,
        "BIGMODEL_RUN_ID": meeting.job,
        "OMP_NUM_THREADS": threads_per_worker(here),
        "RANK": str(node.index * here + index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(plan.world),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(node.index),
        "GROUP_WORLD_SIZE": str(node.count),
        "MASTER_ADDR": node.master_address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": meeting.job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _watch(context: PContext, meeting: Meeting, first_rank: int) -> Ending:
    """Wait until the processes here, and the other nodes, have ended."""
    while (result := context.wait(_POLL_SECONDS, _POLL_SECONDS)) is None:
        if (trouble := meeting.trouble()) is not None:
            context.close(timeout=_END_SECONDS)
            return meeting.end(trouble)
    if not result.is_failed():
        return meeting.end(Ending(code=0))
    leftovers = [
        Leftover(
            rank=first_rank + index,
            code=failure.exitcode if (failure := result.failures.get(index)) else None,
            error_file=Path(context.error_files[index]),
            stderr=Path(file) if (file := context.stderrs[index]) else None,
        )
        for index in range(context.nprocs)
    ]
    # In the order in which they were seen to end.
    culprit = find_culprit(leftovers, first_rank + next(iter(result.failures)))
    for line in culprit.lines:
        _say(line)
    return meeting.end(
        Ending(code=culprit.code, text=culprit.summary + meeting.where())
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
