"""`bigmodel run`: start a script in all processes of a plan, on all its machines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bigmodel.cli.faults import counts_violations, reporting_faults
from bigmodel.errors import UsageError, Violation, raise_if_any

_SEVERAL = "Several machines"


@reporting_faults
def run_command(
    script: Annotated[
        Path, typer.Argument(help="A Python script.", show_default=False)
    ],
    plan: Annotated[
        Path,
        typer.Option(
            help="The plan: what bigmodel plan --out wrote.", show_default=False
        ),
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script, after --.", show_default=False),
    ] = None,
    log_folder: Annotated[
        Path, typer.Option(help="Where the outputs of all ranks but 0 go.")
    ] = Path("bigmodel-logs"),
    nodes: Annotated[
        int,
        typer.Option(
            help="Machines; call the command on each.", rich_help_panel=_SEVERAL
        ),
    ] = 1,
    node_rank: Annotated[
        int, typer.Option(help="Which of them this is.", rich_help_panel=_SEVERAL)
    ] = 0,
    master_addr: Annotated[
        str | None,
        typer.Option(
            help="Name or address of node 0.",
            show_default=False,
            rich_help_panel=_SEVERAL,
        ),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            help="Where node 0 listens: 29500, or with --hostfile one at random.",
            show_default=False,
            rich_help_panel=_SEVERAL,
        ),
    ] = None,
    join_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds to wait for the other machines.", rich_help_panel=_SEVERAL
        ),
    ] = 600.0,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            help="Lines HOST slots=N: call the command on each over ssh.",
            show_default=False,
            rich_help_panel=_SEVERAL,
        ),
    ] = None,
    ssh: Annotated[
        str,
        typer.Option(
            help="Program and options for every host: 'ssh -p 2222 -l user'.",
            rich_help_panel=_SEVERAL,
        ),
    ] = "ssh",
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE for the processes on all hosts; may be repeated.",
            show_default=False,
            rich_help_panel=_SEVERAL,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            help="With --hostfile: only print the commands.", rich_help_panel=_SEVERAL
        ),
    ] = False,
) -> None:
    """Run a script in all processes of a plan, on this machine or several.

    The script finds the plan by itself: bigmodel.prepare reads it.

    For example:

    \b
    bigmodel run recipes/pretrain_gpt.py --plan plan.json -- --steps 20
    bigmodel run train.py --plan plan.json --nodes 2 --node-rank 0 --master-addr A
    bigmodel run train.py --plan plan.json --hostfile hosts --ssh "ssh -p 2222"

    Ends with the exit code of the process that failed first: 2 a user's mistake, 3
    nothing fits, 4 out of memory, 1 anything else.
    """
    from bigmodel.plans import document

    _check(nodes, master_addr, join_timeout, hostfile, env, dry_run, node_rank)
    chosen = document.load(plan)
    if hostfile is not None:
        from bigmodel.running.hosts import read_hosts, run_on_hosts, ssh_commands

        words = [str(script), "--plan", str(plan), "--log-folder", str(log_folder)]
        words += ["--join-timeout", f"{join_timeout:g}"]
        commands = ssh_commands(
            read_hosts(hostfile),
            chosen,
            [*words, "--", *(args or [])],
            ssh=ssh,
            variables=env or [],
            master_address=master_addr,
            master_port=master_port,
        )
        if dry_run:
            for command in commands.values():
                print(shlex.join(command))
            return
        raise typer.Exit(run_on_hosts(commands))
    from bigmodel.running.launcher import run_script

    if nodes == 1:
        code = run_script(script, args or [], chosen, log_folder=log_folder)
        raise typer.Exit(code)
    from bigmodel.running.nodes import Node

    code = run_script(
        script,
        args or [],
        chosen,
        log_folder=log_folder,
        node=Node(
            count=nodes,
            index=node_rank,
            master_address=master_addr or "localhost",
            master_port=master_port or 29500,
        ),
        join_timeout=join_timeout,
    )
    raise typer.Exit(code)


def _check(
    nodes: int,
    master_addr: str | None,
    join_timeout: float,
    hostfile: Path | None,
    env: list[str] | None,
    dry_run: bool,
    node_rank: int,
) -> None:
    """Refuse options that contradict each other, or would have no effect."""
    violations = counts_violations({"--nodes": nodes})
    if hostfile is not None and (nodes != 1 or node_rank):
        violations.append(
            Violation(
                field="--nodes",
                got=nodes,
                rule="--hostfile says how many machines there are",
                cure="leave --nodes and --node-rank out",
            )
        )
    if hostfile is None and nodes > 1 and master_addr is None:
        violations.append(
            Violation(
                field="--master-addr",
                got=None,
                rule="the nodes must know where node 0 is",
                cure="give all of them its name or address",
            )
        )
    if hostfile is None and nodes == 1 and node_rank:
        violations.append(
            Violation(
                field="--node-rank", got=node_rank, rule="there is one node, number 0"
            )
        )
    if hostfile is None and (env or dry_run):
        violations.append(
            Violation(
                field="--env" if env else "--dry-run",
                got=env or dry_run,
                rule="it is for --hostfile; without one it would have no effect",
            )
        )
    violations += [
        Violation(field="--env", got=word, rule="it must be NAME=VALUE")
        for word in env or ()
        if "=" not in word
    ]
    if join_timeout <= 0:
        violations.append(
            Violation(
                field="--join-timeout", got=join_timeout, rule="it must be above 0"
            )
        )
    raise_if_any(violations, UsageError)
