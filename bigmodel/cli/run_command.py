"""`bigmodel run`: start a script in all processes of a plan on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigmodel.cli.faults import reporting_faults


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
) -> None:
    """Run a script in all processes of a plan on this machine.

    The script finds the plan by itself: bigmodel.prepare reads it.

    For example:

    \b
    bigmodel run recipes/pretrain_gpt.py --plan plan.json -- --steps 20

    Ends with the exit code of the process that failed first.
    """
    from bigmodel.plans import document

    chosen = document.load(plan)
    from bigmodel.running.launcher import run_script

    code = run_script(script, args or [], chosen, log_folder=log_folder)
    raise typer.Exit(code)
